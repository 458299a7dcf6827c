// Draws the figures that a notebook stored. plotly.js is loaded before this file.
for (const plot of document.querySelectorAll(".k3-plot")) {
  const { data, layout, frames } = JSON.parse(plot.nextElementSibling.textContent);
  // On a narrow page the figure is wider than the page: a finger then scrolls, it doesn't draw a zoom box.
  const narrow = plot.clientWidth > document.documentElement.clientWidth;
  Plotly.newPlot(plot, { data, layout: narrow ? { ...layout, dragmode: false } : layout, frames, config: { responsive: true, displaylogo: false } });
}
