// Constraints on one tensor, and on one beside another: each function returns [given, needed, fix] for each violation.

import { Spec, compare, equal, listed, prod, repr, slice, typeOf } from "./python.js";

const plural = (count, word) => `${count} ${word}${count == 1 ? "" : "s"}`;
const shapeOf = (spec) => repr(spec.shape);
export const rank = (spec) => spec.shape.length;
const has = (spec, dim) => -rank(spec) <= dim && dim < rank(spec);
const at = (spec, dim) => spec.shape.at(Number(dim));
const strided = (fix) => (c, args, spec) =>
  c.dtypes.includes(spec.dtype) ? [] : [[`${c.name} of ${spec.dtype}`, listed(c.dtypes), fix(c, spec.dtype)]];
const isFloat = (dtype) => dtype.includes("float");

export function broadcasts(small, large) {
  const missing = large.length - small.length;
  return missing >= 0 && small.every((size, place) => size === 1n || size === large[place + missing]);
}

export const tensorKinds = {
  PlainTensor(c, args, value) {
    if (value instanceof Spec || (value === null && !c.required)) return [];
    const given = value === null ? `${c.name} = None` : `${c.name} of type ${typeOf(value)}`;
    const fix = value === null ? `pass ${c.name}` : "convert it with torch.as_tensor";
    return [[given, c.required ? "a torch.Tensor" : "a torch.Tensor or None", fix, "type"]];
  },

  Rank(c, args, spec) {
    const atLeast = c.at_least !== null;
    if (atLeast ? rank(spec) >= c.at_least : c.ranks.includes(BigInt(rank(spec)))) return [];
    const rule = atLeast ? `at least ${c.at_least}` : listed(c.ranks.map(String));
    const wanted = c.at_least || c.ranks.reduce((most, each) => (each > most ? each : most), 0n);
    const fix =
      rank(spec) < wanted
        ? `view ${c.name} with ${wanted} dimensions, with leading ones of size 1`
        : `merge leading dimensions of ${c.name} until it has ${wanted}`;
    return [[`${c.name} with ${plural(rank(spec), "dimension")}`, `${rule} dimension${rule === "1" ? "" : "s"}`, fix]];
  },

  DecayOfHeads(c, args, spec) {
    if (c.ranks.includes(BigInt(rank(spec)))) return [];
    const needed = "one decay for each head, (B, S, Hv): chunks of a decay of each row are no plain matmuls";
    const fix = `pass ${c.name} as (B, S, Hv), or use another backend`;
    return [[`${c.name} with ${plural(rank(spec), "dimension")}`, needed, fix]];
  },

  Dim(c, args, spec) {
    const refused = c.dims.filter((dim) => has(spec, dim) && !fitsDim(c, at(spec, dim)));
    return refused.map((dim) => [
      `dim ${dim} of ${c.name} = ${at(spec, dim)}`,
      dimRule(c),
      dimFix(c, dim, at(spec, dim)),
    ]);
  },

  DType: strided((c) => `convert ${c.name} to ${listed(c.dtypes)}`),
  Floating: strided((c) => `convert it, as in ${c.name}.float()`),
  Between: strided((c) => `convert it, as in ${c.name}.float()`),
  Mask: strided((c, dtype) =>
    isFloat(dtype)
      ? `for an additive mask pass ${c.name} < 0: True means masked out`
      : `pass ${c.name} != 0: True means masked out`,
  ),
  Bytes: strided((c) => `view the bytes of ${c.name}, as in ${c.name}.view(torch.uint8)`),
  Classes: strided((c, dtype) =>
    isFloat(dtype) ? `pass the index of each class, as in ${c.name}.argmax(-1)` : `convert it, as in ${c.name}.long()`,
  ),
  LogSums: strided(
    (c) => `pass ${c.name} as attention returns it; in 16 bits it has lost what the weights depend on`,
  ),
  Offsets: strided((c) => `pass the end of each group of rows, as in counts.cumsum(0), with ${c.name}.long()`),

  OneElement(c, args, spec) {
    const reasons = tensorKinds.DType(c, args, spec);
    if (reasons.length || prod(spec.shape) === 1n) return reasons;
    return [
      [`${c.name} of ${prod(spec.shape)} elements`, "one element", `pass one element, as in ${c.name}[:1]`, "size"],
    ];
  },

  Capability(c, args, spec) {
    const dotted = (version) => version.join(".");
    if (spec.capability === null || compare(">=", spec.capability, c.at_least)) return [];
    const given = `compute capability ${dotted(spec.capability)} of the device of ${c.name}`;
    return [[given, `at least ${dotted(c.at_least)}`, "run on a newer device"]];
  },

  Rows(c, args, spec) {
    const rows = prod(spec.shape.slice(0, -1));
    if (rows <= c.at_most) return [];
    const fix = `split ${c.name} into parts of at most ${c.at_most} rows`;
    return [[`${rows} rows of ${c.name}`, `at most ${c.at_most} rows`, fix]];
  },
};

function fitsDim(c, size) {
  return (
    (c.at_least === null || size >= c.at_least) &&
    (c.at_most === null || size <= c.at_most) &&
    (c.multiple_of === null || size % c.multiple_of === 0n)
  );
}

function dimRule(c) {
  const what = c.multiple_of === null ? "a size" : `a multiple of ${c.multiple_of}`;
  if (c.at_least !== null && c.at_most !== null) return `${what} in [${c.at_least}, ${c.at_most}]`;
  if (c.at_least !== null) return `${what} of at least ${c.at_least}`;
  return c.at_most === null ? what : `${what} of at most ${c.at_most}`;
}

// The smallest size of a multiple that is not below another one.
export const ceil = (size, step) => ((size + step - 1n) / step) * step;

function dimFix(c, dim, size) {
  const step = c.multiple_of ?? 1n;
  const padded = ceil(size > (c.at_least ?? 0n) ? size : c.at_least, step);
  if (c.at_most !== null && padded > c.at_most) {
    return `split ${c.name} so that dim ${dim} is at most ${(c.at_most / step) * step}`;
  }
  return `pad dim ${dim} of ${c.name} from ${size} to ${padded}`;
}

// --------------------------------------------------------------------------------------- a tensor beside another one

// Of two tensors that are there: the function gets the constraint, the two and the arguments.
const beside = (test) => (c, args, spec) => (args[c.other] === null ? [] : test(c, spec, args[c.other], args));

export const besideKinds = {
  Broadcasts: beside((c, spec, other) => {
    if (broadcasts(spec.shape, other.shape)) return [];
    const large = shapeOf(other);
    const needed = `a shape that broadcasts to ${c.other} ${large}: each size, from the last, 1 or ${c.other}'s`;
    const isPadding = rank(spec) === 2 && rank(other) === 4 && equal(spec.shape, [other.shape[0], other.shape[3]]);
    const fix = isPadding ? `pass ${c.name}[:, None, None, :]` : `give ${c.name} sizes of 1 where it repeats`;
    return [[`${c.name} of shape ${shapeOf(spec)}`, needed, fix]];
  }),

  SameShape: beside((c, spec, other) => {
    if (equal(spec.shape, other.shape)) return [];
    const needed = `the shape of ${c.other}, ${shapeOf(other)}`;
    return [[`${c.name} of shape ${shapeOf(spec)}`, needed, "expand the smaller one to it"]];
  }),

  SameDType: beside((c, spec, other) => {
    if (spec.dtype === other.dtype) return [];
    const fix = `convert it, as in ${c.name}.to(${c.other}.dtype)`;
    return [[`${c.name} of ${spec.dtype}`, `the dtype of ${c.other}, ${other.dtype}`, fix]];
  }),

  SameDevice: beside((c, spec, other) => {
    if (spec.device === other.device) return [];
    const given = `${c.name} on ${spec.device} and ${c.other} on ${other.device}`;
    return [[given, "one device", `move it with ${c.name}.to(${c.other}.device)`]];
  }),

  SameDims: beside((c, spec, other) => {
    const last = c.dims.reduce((most, dim) => (dim > most ? dim : most));
    if (Math.min(rank(spec), rank(other)) <= last) return [];
    const different = c.dims.filter((dim) => at(spec, dim) !== at(other, dim));
    return different.map((dim) => [
      `dim ${dim} of ${c.name} = ${at(spec, dim)}`,
      `that of ${c.other}, ${at(other, dim)}`,
      `pass ${c.name} and ${c.other} with one size of dim ${dim}`,
    ]);
  }),

  SameSize: beside((c, spec, other) => {
    if (!has(spec, c.dim) || !has(other, c.other_dim) || at(spec, c.dim) === at(other, c.other_dim)) return [];
    const given = `${c.name} of shape ${shapeOf(spec)} and ${c.other} of ${shapeOf(other)}`;
    const needed = `dim ${c.dim} of ${c.name} of the size of dim ${c.other_dim} of ${c.other}`;
    return [[given, needed, `pass ${c.name} with a dim ${c.dim} of ${at(other, c.other_dim)}`]];
  }),

  DimMultiple: beside((c, spec, other) => {
    if (Math.min(rank(spec), rank(other)) <= c.dim) return [];
    const [size, unit] = [at(spec, c.dim), at(other, c.dim)];
    const fits = unit === 0n ? size === 0n : size % unit === 0n && (c.at_most === null || size <= c.at_most * unit);
    if (fits) return [];
    const most = c.at_most === null ? "" : `, at most ${c.at_most} times as large`;
    const needed = c.at_most === 1n ? `${unit}, as in ${c.other}` : `a multiple of ${unit}, as in ${c.other}${most}`;
    const fix = c.fix || `pass ${c.other} with a size of dim ${c.dim} that divides ${size}`;
    return [[`dim ${c.dim} of ${c.name} = ${size}`, needed, fix]];
  }),

  NotLarger: beside((c, spec, other) => {
    if (Math.min(rank(spec), rank(other)) <= c.dim) return [];
    const [size, most] = [at(spec, c.dim), at(other, c.dim)];
    if (size <= most) return [];
    const fix = c.fix || `pass ${c.name} with a size of dim ${c.dim} of at most ${most}`;
    return [[`dim ${c.dim} of ${c.name} = ${size}`, `at most that of ${c.other}, ${most}`, fix]];
  }),

  LastDims: beside((c, spec, other) => {
    const needed = slice(other.shape, -c.count, null);
    if (rank(spec) == c.count && equal(spec.shape, needed)) return [];
    const fits = prod(spec.shape) === prod(needed);
    const fix = fits ? `pass ${c.name}.view${repr(needed)}` : `pass a ${c.name} of shape ${repr(needed)}`;
    return [[`${c.name} of shape ${shapeOf(spec)}`, `${rule(c)}, ${repr(needed)}`, fix]];
  }),

  LeadingDims: beside((c, spec, other) => {
    const needed = other.shape.slice(0, -1);
    if (rank(other) > 0 && equal(spec.shape, needed)) return [];
    let fix = `pass a ${c.name} of shape ${repr(needed)}`;
    if (equal(spec.shape, [...needed.slice(0, 1), ...other.shape.slice(2)])) {
      fix = `move the second dim of ${c.other} to the end, as in ${c.other}.movedim(1, -1)`;
    } else if (prod(spec.shape) === prod(needed)) fix = `pass ${c.name}.view${repr(needed)}`;
    return [[`${c.name} of shape ${shapeOf(spec)}`, `${rule(c)}, ${repr(needed)}`, fix]];
  }),

  PackedRows(c, args, spec) {
    const [other, sizes] = [args[c.other], c.formats.find(([name]) => name === args[c.format])];
    if (!sizes || !rank(spec) || !rank(other)) return [];
    const [format, weights, bytes] = sizes;
    const columns = at(other, -1);
    if (columns % weights) {
      const needed = `a multiple of ${weights}, the block of ${format}`;
      return [[`dim -1 of ${c.other} = ${columns}`, needed, "use another format or an unpacked weight"]];
    }
    const row = (columns / weights) * bytes;
    if (at(spec, -1) === row) return [];
    const needed = `rows of ${row} bytes, ${columns} weights of ${format}`;
    const fix = `pass fusedops.quantization.quantize(weight, ${repr(format)})`;
    return [[`${c.name} of shape ${shapeOf(spec)}`, needed, fix]];
  },

  Packed(c, args, spec) {
    if (args[c.other] !== null || (rank(spec) > 0 && at(spec, -1) % 2n === 0n)) return [];
    const given = `${c.name} of shape ${shapeOf(spec)} and no ${c.other}`;
    const needed = `an even last dim, which holds ${c.name} and ${c.other}`;
    return [[given, needed, `pass ${c.other}, or pack it into ${c.name}`]];
  },
};

// The phrase of a constraint without the name of the argument.
export const rule = (c) => c.phrase.slice(c.name.length + 2);
