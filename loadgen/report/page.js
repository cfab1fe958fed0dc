// Draws each plot in the colours of the page, and redraws the plot when the colours change.
"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
    automargin: true,
  };
  return { layout: {
    font: { color: colour("--quiet"), family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    xaxis: axis, yaxis: axis,
    hoverlabel: { font: { family: "system-ui, sans-serif" } },
  } };
}

const common = {
  margin: { l: 56, r: 16, t: 30, b: 44 },
  legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
  hovermode: "closest",
};
const options = { displayModeBar: false, responsive: true };

// The library is embedded in compressed form, which makes a page a third as large.
async function loadLibrary() {
  const text = atob(document.querySelector("#plotly").textContent);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(plain).text();
  document.head.append(script);
}

const plots = [];
function draw(figure) {
  const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const showlegend = data.length > 1;
  Plotly.newPlot(plot, data, { ...common, showlegend, template: theme(), ...layout }, options);
  plots.push(plot);
}
const figures = document.querySelectorAll("figure");
if (figures.length) loadLibrary().then(() => figures.forEach(draw));
dark.addEventListener("change", () => {
  for (const plot of plots) Plotly.relayout(plot, { template: theme() });
});
