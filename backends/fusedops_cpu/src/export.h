// How a function of the library is exported.
#pragma once

// cold: what an exported function does before and after its blocks is compiled for size, a tenth of the library; the
// blocks run through pointers, and are not.
#ifdef _WIN32
#define FUSEDOPS_EXPORT extern "C" __declspec(dllexport) __attribute__((cold))
#else
#define FUSEDOPS_EXPORT extern "C" __attribute__((visibility("default"), cold))
#endif
