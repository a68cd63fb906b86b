"use strict";
// Draws the charts of the page and handles its controls. All text from data goes into the page as text, never as markup.
(() => {
  const root = document.documentElement;
  root.classList.add("with-js");
  const all = (query, inside = document) => [...inside.querySelectorAll(query)];
  const data = JSON.parse(document.getElementById("data").textContent).runs;
  const state = { axis: "step", smoothing: 0, log: false, marks: true, drag: !matchMedia("(pointer: coarse)").matches, shown: data.map(() => true), views: {}, range: null };
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  const SVG_DASHES = ["", "7 4", "2 3", "7 3 2 3", "12 4"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];
  const SHAPES = ["M13 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M13 2h8v8h-8z", "M17 1l5 5-5 5-5-5z", "M17 1l5 9H12z", "M13 4l2-2 2 2 2-2 2 2-2 2 2 2-2 2-2-2-2 2-2-2 2-2z"];
  const COLORS = 7;
  const PARTS = [["forward", "forward", "--c4", ""], ["backward", "backward", "--c0", ""], ["optimizer", "optimizer", "--c2", ""], ["data", "waiting for data", "--c5", "/"], ["other", "other", "--c6", ""], ["communication", "waiting for other ranks", "--c1", "\\"]];
  const CIVIDIS = [[0, "#00224e"], [0.125, "#123570"], [0.25, "#3b496c"], [0.375, "#575d6d"], [0.5, "#707173"], [0.625, "#8a8678"], [0.75, "#a59c74"], [0.875, "#c3b369"], [1, "#fee838"]];

  // plotly reads tags and entities in its texts; after this, names from data are shown as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
  const shortEnd = (text, length) => (text.length > length ? "…" + text.slice(1 - length) : text); // names of nodes differ at their end
  const wrap = (text, width) => (String(text).match(new RegExp(`.{1,${width}}(\\s|$)|.{1,${width}}`, "gs")) || [""]).slice(0, 6).map(plain).join("<br>");
  let theme = {};
  const readTheme = () => {
    const style = getComputedStyle(root);
    theme = { of: (name) => style.getPropertyValue(name).trim(), font: getComputedStyle(document.body).fontFamily };
    theme.colors = Array.from({ length: COLORS }, (_, i) => theme.of(`--c${i}`));
  };
  // Lines also differ in the symbols on them, so that they can be told apart without color. Dashes of noisy lines are hard to see.
  const look = (index) => ({ color: theme.colors[index % COLORS], dash: DASHES[Math.floor(index / COLORS) % DASHES.length], symbol: SYMBOLS[index % SYMBOLS.length] });
  const symbolsOn = (trace, index, yaxis = "y") => {
    const count = trace.x.length, some = Array.from({ length: Math.min(6, count) }, (_, i) => Math.min(count - 1, Math.floor(((i + 0.35 + (index % 5) * 0.13) / 6) * count)));
    return { type: "scatter", mode: "markers", yaxis, x: some.map((i) => trace.x[i]), y: some.map((i) => trace.y[i]), hoverinfo: "skip", marker: { symbol: look(index).symbol, size: 8, color: look(index).color, line: { width: 1.5, color: theme.of("--card") } } };
  };
  const narrow = () => innerWidth < 700;

  // ---- axes
  const longest = Math.max(1, ...data.flatMap((run) => Object.values(run.curves).map((curve) => curve.time[curve.time.length - 1] || 0)));
  const [UNIT, SECONDS] = longest > 4 * 86400 ? ["days", 86400] : longest > 3 * 3600 ? ["h", 3600] : longest > 180 ? ["min", 60] : ["s", 1];
  const xs = (curve, run) => (state.axis === "time" ? curve.time.map((t) => t / SECONDS) : state.axis === "samples" ? curve.step.map((s) => s * run.batch) : curve.step);
  const axisTitle = () => ({ step: "step", time: `time (${UNIT})`, samples: "samples" })[state.axis];
  const layout = (more = {}) => {
    const axis = { gridcolor: theme.of("--grid"), linecolor: theme.of("--line"), zeroline: false, automargin: true, tickfont: { size: 11 }, title: { font: { size: 11 }, standoff: 6 } };
    return {
      font: { family: theme.font, color: theme.of("--muted"), size: 11 }, paper_bgcolor: theme.of("--card"), plot_bgcolor: theme.of("--card"),
      margin: { l: 48, r: 20, t: 12, b: 38 }, showlegend: false, hovermode: "x unified", dragmode: state.drag ? "zoom" : false,
      hoverlabel: { bgcolor: theme.of("--card"), bordercolor: theme.of("--line"), font: { color: theme.of("--text"), size: 12 }, namelength: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.of("--muted"), activecolor: theme.of("--link"), orientation: "h" }, ...more,
      xaxis: { ...axis, nticks: narrow() ? 5 : 8, ticklabeloverflow: "allow", ...more.xaxis, title: { ...axis.title, ...(more.xaxis || {}).title } },
      yaxis: { ...axis, nticks: 6, ...more.yaxis, title: { ...axis.title, ...(more.yaxis || {}).title } },
    };
  };
  const config = { displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], showSendToCloud: false, plotlyServerURL: "", toImageButtonOptions: { scale: 2 } };
  const stepAxis = () => ({ title: { text: axisTitle() }, exponentformat: "SI", ...(state.range ? { range: [...state.range], autorange: false } : { autorange: true }) });

  // ---- curves
  const smooth = (values) => {
    let mean = null, weight = 0;
    const keep = state.smoothing;
    return values.map((value) => {
      if (value === null) return null;
      mean = (mean || 0) * keep + value * (1 - keep); weight = weight * keep + (1 - keep);
      return mean / weight;
    });
  };
  const percentOf = (key, values) => (key === "mfu" ? values.map((v) => (v === null ? null : v * 100)) : values);
  const curveTraces = (key, isOver) => data.flatMap((run, i) => {
    if (!Object.hasOwn(run.curves, key) || !state.shown[i]) return []; // a value may have the name "constructor"
    const curve = run.curves[key];
    const isEvaluation = key.startsWith("eval:"), many = data.length > 1, style = look(many ? i : isOver ? 1 : 0);
    const line = { color: style.color, dash: isOver ? "dash" : style.dash };
    const name = plain(short(many ? run.name + (isOver ? " (evaluation)" : "") : isEvaluation ? "evaluation" : "training", 40));
    const smoothed = state.smoothing > 0 && !isEvaluation && key !== "lr", withMarkers = curve.y.length < 3 || (isEvaluation && curve.y.length <= 60 && !(many && isOver));
    const base = { type: "scatter", mode: withMarkers ? "lines+markers" : "lines", name, connectgaps: false, hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>", marker: { symbol: style.symbol, size: curve.y.length > 60 ? 3 : 6, color: style.color } };
    const raw = { ...base, x: xs(curve, run), y: percentOf(key, curve.y), line: { ...line, width: 1.6 } };
    if (!smoothed) return many && !withMarkers ? [raw, symbolsOn(raw, i)] : [raw];
    const source = curve.mean || curve;
    const mean = { ...base, x: xs(source, run), y: smooth(percentOf(key, source.y)), name: `${name}, smoothed`, line: { ...line, width: 2.2 } };
    return [{ ...raw, opacity: 0.25, line: { ...line, width: 1 }, hoverinfo: "skip", hovertemplate: undefined }, mean, ...(many ? [symbolsOn(mean, i)] : [])];
  });
  const LEVELS = { error: ["--bad", "x", 0.97], warning: ["--warn", "triangle-up", 0.97], info: ["--busy", "circle", 0.97], save: ["--muted", "line-ns-open", 0.02] };
  const markTraces = () => Object.entries(LEVELS).flatMap(([level, [color, symbol, height]]) => {
    const found = data.flatMap((run, i) => (state.shown[i] ? run.marks.filter((mark) => (Object.hasOwn(LEVELS, mark.level) ? mark.level : "info") === level).map((mark) => ({ ...mark, run })) : []));
    if (!state.marks || !found.length) return [];
    const x = found.map((mark) => xs({ step: [mark.step], time: [mark.time] }, mark.run)[0]);
    return [{
      type: "scatter", mode: "markers", yaxis: "y2", x, y: x.map(() => height), name: level, marker: { symbol, size: level === "save" ? 7 : 9, color: theme.of(color), line: { width: 1.3, color: theme.of(color) } },
      text: found.map((mark) => (data.length > 1 ? plain(short(mark.run.name, 30)) + ": " : "") + wrap(mark.text, 60)), hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    }];
  });
  // plotly shows 1 above and 1 below a constant value, so that a constant learning rate looks like 0.
  const rangeOfConstant = (traces) => {
    const [first, ...others] = new Set(traces.flatMap((trace) => trace.y).filter((y) => y !== null));
    return others.length || !first || state.log ? {} : { range: [Math.min(0, 2 * first), Math.max(0, 2 * first)] };
  };
  const drawCurve = (box) => {
    const key = box.dataset.key, traces = curveTraces(key, false);
    if (box.dataset.over) traces.push(...curveTraces(box.dataset.over, true));
    const y = { title: { text: plain(box.dataset.unit || "") }, type: state.log ? "log" : "linear", exponentformat: key === "lr" ? "power" : "SI", ...(state.log ? { dtick: null, nticks: 5 } : {}), ...rangeOfConstant(traces) };
    return [traces.concat(markTraces()), layout({ xaxis: stepAxis(), yaxis: y, yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } })];
  };

  // ---- ranks and nodes
  const pattern = (shape, color) => ({ shape, bgcolor: color, fgcolor: theme.of("--card"), fgopacity: 0.75, size: 7, solidity: 0.28, fillmode: "replace" });
  const drawTime = (box) => {
    const run = data[box.dataset.run], ranks = run.ranks, view = ranks.views[state.views[box.dataset.run] || 0];
    const traces = PARTS.filter(([part]) => view.parts[part]).map(([part, name, color, shape]) => ({
      type: "scatter", mode: ranks.step.length < 2 ? "markers" : "lines", stackgroup: "all", x: xs(ranks, run), y: view.parts[part], name, line: { width: 0.5, color: theme.of(color) }, fillcolor: theme.of(color),
      ...(shape ? { fillpattern: pattern(shape, theme.of(color)) } : {}), hovertemplate: "%{y:.4~g} ms<extra>%{fullData.name}</extra>",
    }));
    return [traces, layout({ xaxis: stepAxis(), yaxis: { title: { text: "ms per step" }, rangemode: "tozero" } })];
  };
  const rowLabels = (rows) => rows.map((row) => plain(short(narrow() ? row.replace(/^(rank \d+) .*/s, "$1") : row, narrow() ? 14 : 34)));
  const drawAverage = (box) => {
    const { rows, average } = data[box.dataset.run].ranks, many = rows.length > 40, x = rows.map((_, i) => i);
    const traces = PARTS.filter(([part]) => average[part]).map(([part, name, color, shape]) => ({
      type: "bar", x, y: average[part], name, width: rows.length < 8 ? 0.3 : undefined, marker: { color: theme.of(color), line: { width: 0 }, ...(shape && !many ? { pattern: pattern(shape, theme.of(color)) } : {}) },
      customdata: rows.map((row) => plain(short(row, 60))), hovertemplate: "%{y:.4~g} ms<extra>%{fullData.name}</extra>",
    }));
    const every = Math.ceil(rows.length / (narrow() ? 8 : 24)), ticks = x.filter((i) => i % every === 0);
    const ticktext = ticks.map((i) => plain(shortEnd(rows[i].replace(/^rank (\d+)( .*)?$/s, "$1"), 14)));
    const title = rows[0].startsWith("rank ") ? "rank" : "";
    return [traces, layout({ barmode: "stack", bargap: rows.length > 64 ? 0 : 0.25, xaxis: { tickvals: ticks, ticktext, title: { text: title }, range: [-0.6, rows.length - 0.4] }, yaxis: { title: { text: "ms per step" } } })];
  };
  const drawHeat = (box) => {
    const run = data[box.dataset.run], { rows, slow } = run.ranks, ticks = rows.map((_, i) => i);
    // The scale ends at the slowest row, so that one slow rank among many is not the only one with the brightest color.
    const part = (values, share) => { const known = values.filter((v) => v !== null).sort((a, b) => a - b); return known[Math.floor((known.length - 1) * share)] || 0; };
    const top = Math.max(10, Math.ceil(Math.max(...slow.map((row) => part(row, 0.97))))), low = Math.max(-20, Math.min(-5, Math.floor(part(slow.flat(), 0.01))));
    const every = Math.ceil(rows.length / 24), labels = rowLabels(rows), tickvals = ticks.filter((i) => i % every === 0);
    const trace = {
      type: "heatmap", x: xs(run.ranks, run), y: ticks, z: slow, zmin: low, zmax: top, colorscale: CIVIDIS, hoverongaps: false, xgap: 0, ygap: 0,
      text: rows.map((row) => slow[0].map(() => plain(short(row, 60)))), hovertemplate: "%{text}<br>%{x}: %{z:+.3~g} %<extra></extra>",
      colorbar: narrow() ? { orientation: "h", thickness: 8, y: 1, yanchor: "bottom", ticksuffix: " %", outlinewidth: 0, nticks: 5, len: 0.9 } : { thickness: 10, outlinewidth: 0, ticksuffix: " %", nticks: 6, title: { text: "slower", side: "top", font: { size: 11 } } },
    };
    return [[trace], layout({ hovermode: "closest", margin: { l: 48, r: 12, t: narrow() ? 40 : 12, b: 38 }, xaxis: { ...stepAxis(), showgrid: false }, yaxis: { autorange: "reversed", tickvals, ticktext: tickvals.map((i) => labels[i]), showgrid: false, nticks: undefined } })];
  };
  const drawSystem = (box) => {
    const run = data[box.dataset.run], chart = run.system[box.dataset.key], unit = box.dataset.unit;
    const traces = chart.lines.flatMap((line, i) => {
      const { color, dash } = look(i), trace = { type: "scatter", mode: chart.step.length < 2 ? "markers" : "lines", x: xs(chart, run), y: line.y, name: plain(short(line.name, 40)), line: { color, dash, width: 1.6 }, hovertemplate: `%{y:.4~g} ${unit}<extra>%{fullData.name}</extra>` };
      return chart.lines.length > 1 ? [trace, symbolsOn(trace, i)] : [trace];
    });
    return [traces, layout({ xaxis: stepAxis(), yaxis: { title: { text: unit }, rangemode: "tozero", ...(unit === "%" ? { range: [0, 105] } : {}) } })];
  };
  const drawPoints = (box) => {
    const [x, y] = box.dataset.values.split(";").map((part) => part.split(" ").map(Number)), ends = [Math.min(...x, ...y), Math.max(...x, ...y)];
    return [[
      { type: "scatter", mode: "lines", x: ends, y: ends, line: { color: theme.of("--muted"), width: 1, dash: "dash" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", x, y, marker: { size: 5, color: theme.colors[0], opacity: 0.6 }, hovertemplate: "%{x:.5~g}, %{y:.5~g}<extra></extra>" },
    ], layout({ hovermode: "closest", xaxis: { title: { text: plain(short(box.dataset.x, 40)) } }, yaxis: { title: { text: plain(short(box.dataset.y, 40)) } } })];
  };
  const DRAW = { curve: drawCurve, time: drawTime, average: drawAverage, heat: drawHeat, system: drawSystem, points: drawPoints };
  const FOLLOWS = new Set(["curve", "time", "heat", "system"]);

  // ---- drawing: only what is near the visible part, one chart at a time, so that the page stays usable
  const boxes = all("[data-chart]"), near = new Set(), stale = new Set(boxes), drawn = new Set();
  // A box also changes its width without the window, for example if the page becomes short and its scroll bar vanishes.
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => { if (drawn.has(target) && target.offsetParent && target.clientWidth !== target._fullLayout?.width) Plotly.Plots.resize(target); }));
  const main = document.querySelector("main");
  let isScheduled = false;
  const draw = (box) => {
    stale.delete(box);
    const [traces, frame] = DRAW[box.dataset.chart](box);
    Plotly.react(box, traces, frame, config);
    if (!drawn.has(box)) {
      drawn.add(box);
      resized.observe(box);
      if (FOLLOWS.has(box.dataset.chart)) box.on("plotly_relayout", (change) => follow(change));
    }
  };
  const work = () => {
    isScheduled = false;
    const box = boxes.find((one) => stale.has(one) && near.has(one));
    if (!box) { main.setAttribute("aria-busy", "false"); return; }
    schedule(); // before the chart is drawn, so that an error in it does not keep the others from being drawn
    draw(box);
  };
  const schedule = () => { if (!isScheduled) { isScheduled = true; main.setAttribute("aria-busy", "true"); setTimeout(work, 0); } };
  const redraw = (kinds) => { boxes.forEach((box) => { if (!kinds || kinds.has(box.dataset.chart)) stale.add(box); }); schedule(); };
  const follow = (change) => {
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (from !== undefined) state.range = [from, to];
    else if (change["xaxis.autorange"]) state.range = null;
    else return;
    redraw(FOLLOWS);
  };
  // Plotly.react keeps the ranges that a user has chosen, and parts of a color bar that is placed elsewhere.
  const rebuild = () => { boxes.forEach((box) => { if (drawn.has(box)) { Plotly.purge(box); drawn.delete(box); } }); redraw(); };

  // ---- swatches of lines, as small pictures with color and dash
  const picture = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  };
  const swatches = () => all("i[data-line]").forEach((place) => {
    const index = Number(place.dataset.line), { color, dash } = look(index), svg = picture("svg", { width: 34, height: 12, "aria-hidden": "true" });
    svg.append(picture("line", { x1: 0, x2: 34, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": SVG_DASHES[DASHES.indexOf(dash)] }), picture("path", { d: SHAPES[index % SHAPES.length], fill: color }));
    place.replaceChildren(svg);
  });

  // ---- controls
  const on = (id, event, action) => { const element = document.getElementById(id); if (element) element.addEventListener(event, () => action(element)); };
  all('input[name="axis"]').forEach((input) => input.addEventListener("change", () => { state.axis = input.value; state.range = null; redraw(FOLLOWS); }));
  const setSmoothing = (input) => {
    state.smoothing = Number(input.value);
    document.getElementById("smoothing-value").textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
    redraw(new Set(["curve"]));
  };
  on("smoothing", "input", setSmoothing);
  if (document.getElementById("smoothing")) setSmoothing(document.getElementById("smoothing"));
  on("log", "change", (input) => { state.log = input.checked; redraw(new Set(["curve"])); });
  on("marks", "change", (input) => { state.marks = input.checked; redraw(new Set(["curve"])); });
  on("drag", "change", (input) => { state.drag = input.checked; redraw(); });
  on("reset", "click", () => { state.range = null; rebuild(); });
  all("[data-show]").forEach((input) => input.addEventListener("change", () => { state.shown[input.dataset.show] = input.checked; redraw(new Set(["curve"])); }));
  all("[data-view]").forEach((select) => select.addEventListener("change", () => { state.views[select.dataset.view] = Number(select.value); redraw(new Set(["time"])); }));
  const choose = (select, blocks, name) => {
    const update = () => blocks().forEach((block) => { block.hidden = block.dataset[name] !== select.value; });
    select.addEventListener("change", update);
    update();
  };
  all("[data-tables]").forEach((select) => choose(select, () => all(`.step[data-of="${select.dataset.tables}"]`), "step"));
  all("[data-details]").forEach((select) => choose(select, () => all(".run[data-run]"), "run"));
  all("[data-filter]").forEach((select) => select.addEventListener("change", () => {
    all("tbody tr", select.closest(".predictions")).forEach((row) => { row.hidden = select.value !== "" && row.dataset.group !== select.value; });
  }));
  all("[data-percent]").forEach((input) => input.addEventListener("change", () => input.closest(".confusion").classList.toggle("percent", input.checked)));
  const numberIn = (cell) => Number(cell.textContent.replace(/,/g, "").replace("−", "-"));
  all("table.sortable").forEach((table) => all("thead th", table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") !== "descending", body = table.tBodies[0];
      all("th", table.tHead).forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const key = (row) => row.cells[column], numeric = head.classList.contains("n");
      const order = (a, b) => (numeric ? (numberIn(key(a)) || 0) - (numberIn(key(b)) || 0) : key(a).textContent.localeCompare(key(b).textContent));
      body.append(...[...body.rows].sort((a, b) => (falls ? -order(a, b) : order(a, b))));
    });
  }));

  // ---- navigation, theme, print
  const links = new Map(all("nav a").map((link) => [link.getAttribute("href").slice(1), link]));
  const sections = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }), { rootMargin: "-15% 0px -75% 0px" });
  all("main > section").forEach((one) => sections.observe(one));
  const restyle = () => { readTheme(); swatches(); redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  matchMedia("(max-width: 699px)").addEventListener("change", rebuild);
  addEventListener("beforeprint", () => { root.classList.add("print"); readTheme(); swatches(); boxes.forEach((box) => { if (box.offsetParent) draw(box); }); });
  addEventListener("afterprint", () => { root.classList.remove("print"); restyle(); });
  readTheme();
  swatches();
  const observer = new IntersectionObserver((entries) => {
    entries.forEach((entry) => (entry.isIntersecting ? near.add(entry.target) : near.delete(entry.target)));
    schedule();
  }, { rootMargin: "400px 0px" });
  boxes.forEach((box) => observer.observe(box));
})();
