"use strict";
// Show the values under the pointer, or at the step that the arrow keys have reached. The charts are whole without this.
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
};
const word = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
};
const element = (name, className, text = "") => {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
};
for (const figure of document.querySelectorAll("[data-chart]")) {
  const data = JSON.parse(figure.dataset.chart);
  const [plot, cursor, readout] = [".plot", ".cursor", ".readout"].map((name) => figure.querySelector(name));
  const [lowX, highX] = data.x, [lowY, highY, logarithmic] = data.y;
  const series = data.series.filter((each) => each.x.length);
  const bend = logarithmic ? Math.log10 : (value) => value;
  const up = (value) => Math.min(1, Math.max(0, (bend(Math.max(value, lowY)) - bend(lowY)) / (bend(highY) - bend(lowY))));
  let at = -1, dots = [];
  const hide = () => { cursor.hidden = readout.hidden = true; dots.forEach((dot) => dot.remove()); dots = []; };
  const show = (index) => {
    hide();
    at = Math.min(Math.max(index, 0), series[0].x.length - 1);
    const step = series[0].x[at], left = (step - lowX) / (highX - lowX);
    readout.replaceChildren(element("b", "", "step " + step.toLocaleString("en-US")));
    for (const each of series) {
      const near = nearest(each.x, step), away = each.x[near] - step;
      if (Math.abs(away) > (highX - lowX) / 20) continue;
      const line = element("div", each.tone);
      line.append(element("i", ""), each.name + " " + word(each.y[near]) + (away ? " (step " + each.x[near].toLocaleString("en-US") + ")" : ""));
      readout.append(line);
      const dot = element("div", "dot " + each.tone);
      dot.style.left = ((each.x[near] - lowX) / (highX - lowX)) * 100 + "%";
      dot.style.bottom = up(each.y[near]) * 100 + "%";
      plot.append(dot);
      dots.push(dot);
    }
    cursor.style.left = left * 100 + "%";
    readout.style.left = left < 0.5 ? left * 100 + 2 + "%" : "";
    readout.style.right = left < 0.5 ? "" : (1 - left) * 100 + 2 + "%";
    cursor.hidden = readout.hidden = false;
  };
  if (!series.length) continue;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(series[0].x, lowX + ((event.clientX - box.left) / box.width) * (highX - lowX)));
  });
  plot.addEventListener("pointerleave", hide);
  figure.addEventListener("blur", hide);
  figure.addEventListener("keydown", (event) => {
    const stride = event.shiftKey ? Math.ceil(series[0].x.length / 20) : 1;
    if (event.key === "ArrowRight") show(at < 0 ? 0 : at + stride);
    else if (event.key === "ArrowLeft") show(at < 0 ? series[0].x.length - 1 : at - stride);
    else if (event.key === "Home") show(0);
    else if (event.key === "End") show(series[0].x.length - 1);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
}
addEventListener("beforeprint", () => document.querySelectorAll(".card > details:first-child").forEach((each) => { each.open = true; }));
