// What the next machine would change, computed from what was measured: step times of Shards and round trips of links.
// Nothing here is a promise; what rests on anything that nobody measured is null.

/**
 * For one group of an explained route (Shards of one content and engine class), with a further machine that is as fast
 * for each layer as those that are here on average:
 *   kind   "gap": it brings layers that are missing; "copy": all are there
 *   range  the layers that the Tracker would give it, if it has memory for them
 *   now    tokens/s of one answer on the best route as it is
 *   one    tokens/s of one answer with it
 *   all    [now, with it]: tokens/s of any number of answers at a time, one row a step, until the slowest range is full
 *   whole  tokens/s of one answer on it alone, if it has memory for all layers
 */
export function expected(group) {
  const shards = group.shards.filter((shard) => shard.usable);
  const layerMs = meanOf(shards.filter((shard) => shard.measured).map((shard) => shard.decode_ms / lengthOf(shard.layers)));
  const whole = perSecond(layerMs === null ? null : layerMs * group.n_layers);
  if (group.missing.length) return { kind: "gap", range: group.missing[0], now: null, one: filled(group, shards, layerMs), all: null, whole };
  const now = perSecond(measuredStep(group.routes.find((route) => route.taken) ?? group.routes[0], shards));
  const range = thinnest(group.n_layers, shards);
  return { kind: "copy", range, now, one: now, all: together(group.n_layers, shards, range, layerMs), whole };
}

const lengthOf = ([first, last]) => last - first;
const meanOf = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const perSecond = (ms) => (ms > 0 ? 1000 / ms : null);

/** Milliseconds of one step on a route, or null where a part of it was assumed. */
function measuredStep(route, shards) {
  if (!route) return null;
  const isMeasured = (node) => shards.some((shard) => shard.node === node && shard.measured);
  const linked = route.nodes.length < 2 || route.edges.every((edge) => edge.measured);
  return linked && route.nodes.every(isMeasured) ? route.estimate_ms : null;
}

/** Tokens/s of one answer once the gaps are filled: needs a measurement of every layer that is there, and of a link. */
function filled(group, shards, layerMs) {
  const hops = meanOf(group.routes.flatMap((route) => route.edges).filter((edge) => edge.measured).map((edge) => edge.ms));
  const owners = Array.from({ length: group.n_layers }, (_, layer) => shards.find((shard) => holds(shard, layer)));
  if (layerMs === null || owners.some((shard) => shard && !shard.measured)) return null;
  const parts = owners.filter((shard, layer) => layer === 0 || shard !== owners[layer - 1]).length;
  if (parts > 1 && hops === null) return null;
  const compute = owners.reduce((sum, shard) => sum + (shard ? shard.decode_ms / lengthOf(shard.layers) : layerMs), 0);
  return perSecond(compute + (parts > 1 ? parts * hops : 0));
}

const holds = ({ layers }, layer) => layers[0] <= layer && layer < layers[1];

/** As the Tracker places a Node where nothing is missing: the fewest copies, then the most time, then the longest. */
function thinnest(n, shards) {
  const copies = Array.from({ length: n }, (_, layer) => shards.filter((shard) => holds(shard, layer)).length);
  const rank = (shard) => [Math.min(...copies.slice(...shard.layers)), -shard.decode_ms, -lengthOf(shard.layers), shard.layers[0]];
  const sorted = shards.toSorted((a, b) => rank(a).map((value, i) => value - rank(b)[i]).find((difference) => difference) ?? 0);
  return sorted[0]?.layers ?? null;
}

/** What all layers let through in a second, now and with one more that has `range`. */
function together(n, shards, range, layerMs) {
  if (range === null || layerMs === null || shards.some((shard) => !shard.measured || !(shard.decode_ms > 0))) return null;
  const through = (held) => Math.min(...Array.from({ length: n }, (_, layer) => held.filter((shard) => holds(shard, layer)).reduce((sum, shard) => sum + 1000 / shard.decode_ms, 0)));
  return [through(shards), through([...shards, { layers: range, decode_ms: layerMs * lengthOf(range) }])];
}
