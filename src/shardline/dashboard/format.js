// Numbers, sizes, times and names as people read them. A dash stands where nothing was measured.

const whole = new Intl.NumberFormat("en");

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const counted = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** Milliseconds, as `0.42 ms`, `12.3 ms`, `340 ms`, `1.2 s`, `3 min 20 s`. */
export function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} ms`;
  if (value < 100) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${value.toFixed(0)} ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(at === 0 || value >= 100 ? 0 : 1)} ${units[at]}`;
}

export const share = (part, all) => (all > 0 ? Math.min(1, Math.max(0, part / all)) : 0);
export const percent = (part, all) => (all > 0 ? `${Math.round(100 * share(part, all))} %` : "–");
export const rate = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0));
/** Half-open, as everywhere in Shardline; null of a composite Node, which has all, and nobody knows how many. */
export const layers = (range) => (range ? `${range[0]}:${range[1]}` : "all");
export const layersWords = (range) => (range ? `layers ${layers(range)}` : "all layers");
/** The beginning of an id: enough to tell Nodes apart, and to give to a command. */
export const short = (id) => (id && id.length > 10 ? id.slice(0, 8) : (id ?? "–"));
/** A host name without the machine id behind it. */
export const machine = (host) => (host ?? "").split("/")[0];
/** Of the same width everywhere: for columns. */
export const clock24 = (unix) => new Date(unix * 1000).toLocaleTimeString("en", { hourCycle: "h23" });
export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
