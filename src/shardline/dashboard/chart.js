// Lines over time by uPlot: drawn into an element of ours, in the colours of the page, anew when these change.

import { h } from "./dom.js";
import uPlot from "./uplot/uPlot.esm.js";

const charts = new WeakMap(); // element -> { plot, samples, last }
const dark = matchMedia("(prefers-color-scheme: dark)");

/** tokens/s over seconds; `samples` are [[seconds, rate]]. `axes`: with numbers at its sides. */
export function speedChart(samples, { height = 44, axes = false, label }) {
  return h("div", {
    class: axes ? "chart" : "spark",
    own: true,
    role: "img",
    "aria-label": label,
    style: { height: `${height}px` },
    each: (element) => show(element, samples, height, axes),
  });
}

function show(element, samples, height, axes) {
  let chart = charts.get(element);
  if (!chart) {
    chart = { plot: null, samples, last: null };
    charts.set(element, chart);
    draw(element, chart, height, axes);
    new ResizeObserver(() => fit(element, chart, height)).observe(element);
    dark.addEventListener("change", () => element.isConnected && draw(element, chart, height, axes));
  }
  const last = samples.at(-1) ?? null;
  if (chart.samples === samples && chart.last === last) return;
  Object.assign(chart, { samples, last });
  chart.plot.setData(columns(samples));
}

const columns = (samples) => [samples.map(([at]) => at), samples.map(([, value]) => value)];

function draw(element, chart, height, axes) {
  chart.plot?.destroy();
  chart.plot = new uPlot(options(element, height, axes), columns(chart.samples), element);
}

function fit(element, chart, height) {
  const width = element.clientWidth;
  if (element.isConnected && width > 0 && width !== chart.plot.width) chart.plot.setSize({ width, height });
}

function options(element, height, axes) {
  const line = getComputedStyle(element).color;
  const quiet = getComputedStyle(element.parentElement).color;
  const axis = { stroke: quiet, grid: { stroke: transparent(quiet, 0.18), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width: Math.max(40, element.clientWidth),
    height,
    cursor: { show: false },
    legend: { show: false },
    padding: axes ? [8, 8, 0, 0] : [3, 2, 3, 2],
    scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(1, (most ?? 0) * 1.15)] } },
    axes: axes
      ? [
          { ...axis, size: 24, values: (_, ticks) => ticks.map((tick) => `${tick} s`) },
          { ...axis, size: 44 },
        ]
      : [{ show: false }, { show: false }],
    series: [{}, { stroke: line, width: 1.5, points: { show: false }, fill: transparent(line, 0.14) }],
  };
}

function transparent(colour, share) {
  const found = colour.match(/^rgb\((\d+), (\d+), (\d+)\)$/);
  return found ? `rgba(${found[1]}, ${found[2]}, ${found[3]}, ${share})` : colour;
}
