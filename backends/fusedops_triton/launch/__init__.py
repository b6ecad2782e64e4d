"""The launch of a kernel: the chips as data, the settings that follow from them, and launches that are kept."""
