// Constraints of single ops and kernels on several shapes: attention, rotary embedding, experts, linear attention, views.

import { equal, prod, repr, shown, typeOf } from "./python.js";
import { besideKinds, broadcasts, rank, tensorKinds } from "./kinds_tensors.js";

const ALIGNMENTS = ["none", "upper_left", "lower_right"];
const isWindow = (value) =>
  typeOf(value) === "tuple" &&
  value.length === 2 &&
  value.every((each) => typeOf(each) === "int" && each >= 0n && each < 2n ** 63n);

export const attentionKinds = {
  ScoreMask(c, args, mask) {
    const [q, k] = [args[c.q], args[c.k]];
    if (rank(q) !== 4 || rank(k) !== 4) return [];
    const scores = [...q.shape.slice(0, 3), k.shape[2]];
    if (broadcasts(mask.shape, scores)) return [];
    const given = `${c.name} of shape ${repr(mask.shape)}`;
    const fix = "give each dim the size of the scores (B, Nq, Sq, Sk), or 1";
    return [[given, `a shape that broadcasts to ${repr(scores)}`, fix]];
  },

  Alignment(c, args, value) {
    const [q, k] = [args[c.q], args[c.k]];
    if (rank(q) < 3 || rank(k) < 3) return [];
    const [sq, sk] = [q.shape[2], k.shape[2]];
    const known = ALIGNMENTS.includes(value);
    if (known && (value === "none" || c.alignments.includes(value) || sq === sk)) return [];
    const given = `${c.name} = ${shown(value)}`;
    if (value === true) {
      const needed = "'upper_left' (query i sees the keys up to i) or 'lower_right' (the last query sees every key)";
      const uses = "'upper_left' for torch's is_causal, 'lower_right' for flash-attn's causal";
      return [
        [
          `${given} with ${sq} queries and ${sk} keys`,
          needed,
          `pass ${c.name}=${uses} and for decoding with cached keys`,
        ],
      ];
    }
    if (known) {
      const fix = `pass as many queries as keys, or the causal mask as a mask, with ${c.name}=False`;
      return [[`${given} with ${sq} queries and ${sk} keys`, c.phrase.slice(c.name.length + 2), fix]];
    }
    const needed = "False, 'upper_left' or 'lower_right', or True where Sq == Sk";
    return [[given, needed, `pass ${c.name} as False, or one of the two texts`]];
  },

  Window(c, args, value) {
    if (isWindow(value)) return [];
    const fix = `pass ${c.name}=(left, right), such as (127, 0) for the newest 128 keys, or None`;
    return [[`${c.name} = ${shown(value)}`, "None, or two ints of at least 0", fix]];
  },
};

const fitting = (test, fix) => (c, args, spec) => {
  const q = args[c.other].shape;
  const [seqDim, length] = [Number(args[c.seq_dim]), q.at(Number(args[c.seq_dim]))];
  if (test(spec.shape, q, seqDim)) return [];
  // the phrase has the names of q and of its length, which the reason replaces by their values
  const needed = c.phrase
    .slice(c.name.length + 2)
    .replaceAll(/\bS\b/g, length)
    .replace(` ${c.other} `, ` ${c.other} ${repr(q)} `);
  return [[`${c.name} of shape ${repr(spec.shape)}`, needed.replace(` ${c.other},`, ` ${c.other} ${repr(q)},`), fix(c.name)]];
};

export const rotaryKinds = {
  Heads: fitting(
    (k, q, seqDim) => {
      const heads = q.length + (seqDim === -2 ? -3 : -2);
      const others = (shape) => shape.filter((_, at) => at !== heads);
      return k.length === q.length && equal(others(k), others(q));
    },
    (name) => `pass ${name} of the same tokens, and seq_dim for the layout of both`,
  ),

  Angles: fitting(
    (given, q, seqDim) => {
      const heads = q.length + (seqDim === -2 ? -3 : -2);
      const hasHeads = given.length === q.length && given[heads] === 1n;
      const cos = hasHeads ? given.filter((_, at) => at !== heads) : given;
      return (
        cos.length >= 2 &&
        cos.at(-2) === q.at(seqDim) &&
        2n * cos.at(-1) <= q.at(-1) &&
        broadcasts(cos.slice(0, -2), q.slice(0, -3))
      );
    },
    (name) =>
      `pass one entry for each rotated pair: of a doubled one ${name}[..., : R // 2], ` +
      `or ${name}[..., ::2] if interleaved`,
  ),

  WholeHead(c, args, angle) {
    const [entries, size] = [angle.shape.at(-1), args[c.other].shape.at(-1)];
    if (2n * entries === size) return [];
    const needed = `half of the last dim of ${c.other}: the vendor's op rotates all of it`;
    const fix = `if interleaved, pad ${c.name} with 1 and sin with 0; if not, rotate ${c.other}[..., :R] alone`;
    return [[`${c.name} of ${entries} entries for heads of ${size}`, needed, fix]];
  },

  FewHeads(c, args, spec) {
    const { interleaved, seq_dim: seqDim } = args;
    if (spec.shape.includes(0n)) return [];
    const [headsAt, lengthAt] = seqDim === -3n ? [-2, -3] : [-3, -2];
    const [batch, heads, length] = [prod(spec.shape.slice(0, -3)), spec.shape.at(headsAt), spec.shape.at(lengthAt)];
    const given = `${c.name} of B = ${batch}, N = ${heads}, S = ${length}`;
    if (interleaved) return batch * heads < 1000n ? [] : [[given, "B * N below 1000", "split the batch"]];
    if (batch >= 1000n || heads >= 1000n) return [[given, "B and N below 1000", "split the batch or the heads"]];
    const oneLayout = heads > 1n || length > 1n; // (B, 1, 1, D) is of both
    if ((seqDim === -3n && oneLayout) || batch * heads <= 8n * length) return [];
    const fix = oneLayout ? "transpose it, and pass seq_dim=-3" : "split the batch";
    return [[given, "B * N at most 8 * S with seq_dim -2, or N = S = 1", fix]];
  },
};

const GATED = ["swiglu", "geglu", "geglu_tanh"];

// Rows and columns of a weight of experts.
const sidesOf = (weight, transposed) => (transposed ? [weight[2], weight[1]] : [weight[1], weight[2]]);

function shapeOfDown(up, { activation, transposed }) {
  const [rows, width] = sidesOf(up, transposed);
  const inner = GATED.includes(activation) ? rows / 2n : rows;
  return transposed ? [up[0], inner, width] : [up[0], width, inner];
}

const ofExperts = (otherRank, needed, fix) => (c, args, spec) => {
  const other = args[c.other];
  if (spec === null || other === null || rank(other) !== otherRank) return [];
  const expected = needed(c, args, spec, other.shape);
  return expected === null ? [] : [[`${c.name} of shape ${repr(spec.shape)}`, expected, fix(c, args)]];
};
const swapped = (c, args) => `pass transposed=${args.transposed ? "False" : "True"} for weights with their last two dims swapped`;

export const expertsKinds = {
  UpFits: ofExperts(
    2,
    (c, { activation, transposed }, spec, x) => {
      if (rank(spec) !== 3) return null;
      const [rows, width] = sidesOf(spec.shape, transposed);
      const gated = GATED.includes(activation);
      if (width === x[1] && (rows % 2n === 0n || !gated)) return null;
      const [packed, columns] = [gated ? "2I" : "I", x[1]];
      return transposed ? `(E, ${columns}, ${packed})` : `(E, ${packed}, ${columns})`;
    },
    swapped,
  ),

  DownFits: ofExperts(
    3,
    (c, args, spec, up) => {
      const needed = shapeOfDown(up, args);
      return rank(spec) !== 3 || equal(spec.shape, needed) ? null : repr(needed);
    },
    swapped,
  ),

  WeightFits: ofExperts(
    2,
    (c, { transposed }, spec, x) => {
      if (rank(spec) !== 3 || sidesOf(spec.shape, transposed)[1] === x[1]) return null;
      return transposed ? `(E, ${x[1]}, N)` : `(E, N, ${x[1]})`;
    },
    swapped,
  ),

  BiasFits: ofExperts(
    3,
    (c, { transposed }, spec, weight) => {
      const needed = [weight[0], sidesOf(weight, transposed)[0]];
      return equal(spec.shape, needed) ? null : repr(needed);
    },
    (c) => `pass one element for each expert and each output of ${c.other}`,
  ),
};

export const convolutionKinds = {
  ConvStateFits(c, { x, weight, cu_seqlens: bounds }, spec) {
    const ranks = [rank(spec), rank(x), rank(weight), bounds === null ? 1 : rank(bounds)];
    if (ranks.join() !== "3,3,2,1") return [];
    const packed = bounds !== null;
    const needed = [packed ? bounds.shape[0] - 1n : x.shape[0], x.shape[1], weight.shape[1] - 1n];
    if (equal(spec.shape, needed)) return [];
    const kept = needed[2];
    const text = `${repr(needed)}, the ${packed ? "sequences" : "batches"}, channels and W - 1`;
    const withNewest = equal(spec.shape, [...needed.slice(0, 2), kept + 1n]);
    const fix = withNewest
      ? `pass ${c.name}[..., 1:], without the oldest input`
      : `pass the last ${kept} inputs before each sequence`;
    return [[`${c.name} of shape ${repr(spec.shape)}`, text, fix]];
  },
};

// The shapes that a tensor may have beside v, from v's and q's.
const ofPositions = (rule, shapes) => (c, args, spec) => {
  const [v, q] = [args.v, args.q];
  if (rank(v) !== 4 || (c.type !== "BetaFits" && rank(q) !== 4)) return [];
  const expected = shapes(v.shape, q.shape, args);
  if (expected.some((shape) => equal(spec.shape, shape))) return [];
  return [[`${c.name} of shape ${repr(spec.shape)}`, expected.map(repr).join(" or "), `pass ${c.name} as ${rule}`]];
};

export const linearAttentionKinds = {
  Normalized(c, args, value) {
    if (value === true) return [];
    return [[`${c.name} = ${shown(value)}`, "True", "use another backend where q and k must not be normalized"]];
  },

  Unpacked: (c, args, given) => (given === null ? [] : [[`a ${c.name}`, `no ${c.name}`, c.fix]]),

  ValueHeads: tensorKinds.Dim,

  GroupedHeads: (c, args, spec) => besideKinds.DimMultiple(c, args, spec),

  DecayFits: ofPositions("(B, S, Hv), or (B, S, Hv, Dk)", (v, q) => [v.slice(0, 3), [...v.slice(0, 3), q[3]]]),

  BetaFits: ofPositions("(B, S, Hv)", (v) => [v.slice(0, 3)]),

  StateFits: ofPositions("(B, Hv, Dk, Dv), with cu_seqlens (N, Hv, Dk, Dv)", (v, q, { cu_seqlens: bounds }) => {
    const count = bounds === null || rank(bounds) !== 1 ? v[0] : bounds.shape[0] - 1n;
    return [[count, v[2], q[3], v[3]]];
  }),
};

export const viewKinds = {
  ViewableAs4D(c, args, mask) {
    const x = args[c.other];
    if (rank(x) <= 4 || canSplit(x.shape, mask.shape)) return [];
    const given = `${c.name} of shape ${repr(mask.shape)} for ${c.other} of ${repr(x.shape)}`;
    const needed = `leading dims of ${c.other} in two groups, in each of which ${c.name} has size 1 or ${c.other}'s sizes`;
    return [[given, needed, `expand ${c.name} to ${repr([...x.shape.slice(0, -2), ...mask.shape.slice(-2)])}`]];
  },
};

// Can the leading dims be split in two groups, in each of which the mask has size 1 or the sizes of x?
function canSplit(x, mask) {
  const lead = x.length - 2;
  const masked = [...Array(x.length - mask.length).fill(1n), ...mask].slice(0, lead);
  const fits = (from, to) => {
    const group = masked.slice(from, to);
    return equal(group, x.slice(from, to)) || group.every((size) => size === 1n);
  };
  return Array.from({ length: lead - 1 }, (_, place) => place + 1).some((split) => fits(0, split) && fits(split, lead));
}
