// The browser side of every panel: controls in plain HTML (labels, arrow keys and Tab work by themselves) and one plotly picture.

// plotly.js arrives gzipped in a widget that all panels share; the page keeps one unpacked copy under a name with its version.
async function plotly(model) {
  const library = await model.widget_manager.get_model(model.get("library").replace("IPY_MODEL_", ""));
  const key = "__k3viz_plotly_" + library.get("version");
  globalThis[key] ??= unpack(library.get("gz")).catch((error) => { delete globalThis[key]; throw error; });
  return globalThis[key];
}

async function unpack(gz) {
  const unzipped = new Blob([gz]).stream().pipeThrough(new DecompressionStream("gzip"));
  const code = await new Response(unzipped).text();
  const module = { exports: {} };
  new Function("module", "exports", "define", code)(module, module.exports, undefined); // hidden from any AMD loader on the page
  return module.exports;
}

function element(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  // On every element that takes the focus, or JupyterLab takes the arrow keys for itself; on a parent it has no effect.
  if (["input", "select", "button"].includes(tag)) node.dataset.lmSuppressShortcuts = "true";
  return node;
}

// Dark page? JupyterLab says so; elsewhere the text color tells.
function isDark(el) {
  const lab = document.body.dataset.jpThemeLight;
  if (lab !== undefined) return lab === "false";
  const [r, g, b] = (getComputedStyle(el).color.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
  return 0.3 * r + 0.6 * g + 0.1 * b > 140;
}

// Drawn, because many fonts lack the player's symbols.
const ICONS = { rewind: "M3 3h2v10H3zM13 3v10L6 8z", back: "M11 3v10L4 8z", play: "M4 2v12l10-6z", pause: "M4 3h3v10H4zM9 3h3v10H9z", forth: "M5 3v10l7-5z" };
const icon = (name) => `<svg viewBox="0 0 16 16" width="14" height="14" aria-hidden="true"><path fill="currentColor" d="${ICONS[name]}"/></svg>`;

// Labels find their controls by id. The counter is the page's: every widget runs its own copy of this file.
const newId = () => `k3viz-${(globalThis.__k3viz_ids = (globalThis.__k3viz_ids ?? 0) + 1)}`;

// One builder a kind of control. Each returns { node, show(value, spec) }; `change(value)` tells the panel.
const BUILD = {
  slider(c, change) {
    const id = newId();
    const input = element("input", { type: "range", id, min: c.low, max: c.high, step: c.step });
    const digits = (String(c.step).split(".")[1] || "").length;
    const out = element("span", { className: "k3viz-value", ariaHidden: "true" });
    const show = (v) => {
      input.value = v;
      out.textContent = c.labels[Math.round((v - c.low) / c.step)] ?? Number(v).toFixed(digits);
      input.setAttribute("aria-valuetext", out.textContent);
    };
    input.addEventListener("input", () => { show(Number(input.value)); change(Number(input.value)); });
    return { node: element("div", { className: "k3viz-control" }, element("label", { htmlFor: id, textContent: c.label }), input, out), show };
  },

  choice(c, change) {
    const id = newId();
    const select = element("select", { id }, ...c.options.map(([value, text]) => element("option", { value, textContent: text })));
    select.addEventListener("change", () => change(select.value));
    const show = (v) => { select.value = v; };
    return { node: element("div", { className: "k3viz-control" }, element("label", { htmlFor: id, textContent: c.label }), select), show };
  },

  checks(c, change) {
    const boxes = c.options.map(([value]) => element("input", { type: "checkbox", value, id: newId() }));
    const labels = boxes.map((box, i) => element("label", { htmlFor: box.id }, box, " " + c.options[i][1]));
    for (const box of boxes) box.addEventListener("change", () => change(boxes.filter((b) => b.checked).map((b) => b.value)));
    const show = (v) => { for (const box of boxes) box.checked = v.includes(box.value); };
    return { node: element("fieldset", { className: "k3viz-checks" }, element("legend", { textContent: c.label }), ...labels), show };
  },

  text(c, change) {
    const id = newId();
    const input = element("input", { type: "text", id });
    let sent = c.value;
    const send = () => { if (input.value !== sent) change((sent = input.value)); };
    input.addEventListener("change", send);
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") send(); });
    const show = (v) => { if (input !== document.activeElement) input.value = v; };
    return { node: element("div", { className: "k3viz-control k3viz-wide" }, element("label", { htmlFor: id, textContent: c.label }), input), show };
  },

  player(c, change, ready) {
    const id = newId();
    let labels = c.labels, at = c.value, timer = null;
    const input = element("input", { type: "range", id, min: 0, step: 1 });
    const out = element("span", { className: "k3viz-value", ariaHidden: "true" });
    const face = (b, name, title) => { b.innerHTML = icon(name); b.title = title; b.setAttribute("aria-label", title); };
    const button = (name, title, act) => {
      const b = element("button", { type: "button" });
      face(b, name, title);
      b.addEventListener("click", act);
      return b;
    };
    const stop = () => { clearInterval(timer); timer = null; face(play, "play", "play"); };
    const go = (to) => { at = Math.max(0, Math.min(labels.length - 1, to)); paint(); change(at); };
    const paint = () => { input.max = labels.length - 1; input.value = at; out.textContent = `${at + 1} of ${labels.length}: ${labels[at] ?? ""}`; input.setAttribute("aria-valuetext", out.textContent); };
    const start = () => {
      if (at >= labels.length - 1) go(0);
      face(play, "pause", "pause");
      timer = setInterval(() => { if (!ready()) return; if (at >= labels.length - 1) stop(); else go(at + 1); }, 900);
    };
    const play = button("play", "play", () => (timer ? stop() : start()));
    const rewind = button("rewind", "rewind", () => { stop(); go(0); });
    const back = button("back", "one step back", () => { stop(); go(at - 1); });
    const forth = button("forth", "one step forward", () => { stop(); go(at + 1); });
    input.addEventListener("input", () => { stop(); go(Number(input.value)); });
    const show = (v, spec) => { labels = spec.labels; at = v; paint(); };
    const buttons = element("span", { className: "k3viz-buttons" }, rewind, back, play, forth);
    return { node: element("div", { className: "k3viz-control k3viz-wide" }, element("label", { htmlFor: id, textContent: c.label }), buttons, input, out), show, stop };
  },
};

async function render({ model, el }) {
  let gone = false, Plotly = null, waiting = false, again = false, drawing = false, drawAgain = false, listening = false, failed = "";
  const status = element("p", { className: "k3viz-sentence" });
  status.setAttribute("role", "status");
  const problem = element("p", { className: "k3viz-problem" });
  problem.setAttribute("role", "alert");
  const picture = element("div", { className: "k3viz-picture" });
  picture.setAttribute("role", "img");
  const form = element("div", { className: "k3viz-controls" });
  const root = element("section", { className: "k3viz-panel" }, form, status, problem, picture);
  root.setAttribute("aria-label", model.get("name"));
  el.append(root);

  // From the question until its picture stands on the page.
  const showBusy = () => root.setAttribute("aria-busy", waiting || drawing);
  // Ask the kernel for a drawing; while one is on its way only remember that there is more to ask.
  const ask = () => {
    if (waiting) { again = true; return; }
    waiting = true;
    showBusy();
    model.set("asked", model.get("asked") + 1);
    model.save_changes();
  };
  const controls = model.get("controls").map((c) => {
    const change = (value) => { model.set("values", { ...model.get("values"), [c.name]: value }); ask(); };
    const control = BUILD[c.kind](c, change, () => !waiting);
    form.append(control.node);
    return { name: c.name, ...control };
  });
  const showValues = () => {
    const values = model.get("values"), specs = Object.fromEntries(model.get("controls").map((c) => [c.name, c]));
    for (const c of controls) c.show(values[c.name], specs[c.name]);
  };
  const showState = () => {
    status.textContent = model.get("sentence");
    problem.textContent = model.get("problem") || failed;
    problem.hidden = !problem.textContent;
    picture.setAttribute("aria-label", model.get("sentence"));
    for (const c of controls) c.node.hidden = model.get("hidden").includes(c.name);
  };
  const answered = () => {
    if (model.get("answered") !== model.get("asked")) return;
    waiting = false;
    if (again) { again = false; ask(); } else showValues();
    showBusy();
  };
  const drawn = (error) => { failed = error ? "The picture could not be drawn: " + error.message : ""; showState(); };
  const draw = async () => {
    if (!Plotly || gone) return;
    if (drawing) { drawAgain = true; return; }
    drawing = true;
    showBusy();
    const p = model.get("picture");
    const layout = { ...p.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    try {
      await Plotly.react(picture, p.data, layout, { displaylogo: false, responsive: true, displayModeBar: false });
      if (!listening) { listening = true; picture.on?.("plotly_click", clicked); }
      drawn();
    } catch (error) {
      drawn(error);
    } finally {
      drawing = false;
    }
    if (drawAgain) { drawAgain = false; draw(); } else showBusy();
  };
  // A point of the picture whose id is "part=router" sets the control "part" when it is clicked.
  const clicked = (event) => {
    const [, name, value] = /^(\w+)=(.*)$/.exec(event.points?.[0]?.id ?? "") ?? [];
    const spec = model.get("controls").find((c) => c.name === name);
    if (!spec) return;
    model.set("values", { ...model.get("values"), [name]: ["slider", "player"].includes(spec.kind) ? Number(value) : value });
    showValues();
    ask();
  };
  const themed = () => { const dark = isDark(el); if (dark !== model.get("dark")) { model.set("dark", dark); model.save_changes(); } };

  const listeners = { "change:picture": draw, "change:sentence": showState, "change:problem": showState, "change:hidden": showState,
    "change:answered": answered, "change:controls": showValues, "change:values": () => { if (!waiting) showValues(); } };
  for (const [event, act] of Object.entries(listeners)) model.on(event, act);
  const themes = new MutationObserver(themed);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  showValues(); showState(); themed();
  const shown = () => { if (!gone) { model.set("shown", model.get("shown") + 1); model.save_changes(); } };
  plotly(model).then((P) => { Plotly = P; return draw(); }).then(() => (globalThis.requestIdleCallback ?? setTimeout)(shown)).catch(drawn);
  return () => {
    gone = true;
    themes.disconnect();
    for (const c of controls) c.stop?.();
    for (const [event, act] of Object.entries(listeners)) model.off(event, act);
    if (Plotly) Plotly.purge(picture);
  };
}

export default { render };
