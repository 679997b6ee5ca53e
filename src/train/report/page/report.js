"use strict";
// Draws the charts of the page from its data. All text goes through textContent: what is in a log is never markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const run = data.runs[0];
  const SVG = "http://www.w3.org/2000/svg";
  const live = document.getElementById("live");

  const make = (name, attributes = {}, parent) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  };
  const element = (name, text, parent, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    if (parent) parent.append(made);
    return made;
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Numbers with units.
  const short = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e4 && size < 1e7 && value === Math.round(value)) return whole(value);
    if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };
  const whole = (value) => Math.round(value).toLocaleString("en");
  const units = {
    plain: short,
    count: (value) => (Math.abs(value) >= 10 ? whole(value) : short(value)),
    share: (value) => short(Number((100 * value).toFixed(1))) + " %",
    time: (value) => (value >= 1 || value === 0 ? short(value) + " s" : value >= 1e-3 ? short(value * 1e3) + " ms" : short(value * 1e6) + " µs"),
    bytes: (value) => (value >= 1e9 ? (value / 1e9).toFixed(1) + " GB" : (value / 1e6).toFixed(1) + " MB"),
    // On an axis, whose numbers are round.
    round_bytes: (value) => (value >= 1e9 ? short(value / 1e9) + " GB" : short(value / 1e6) + " MB"),
  };

  // About `count` round numbers from low to high.
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999) || power * 10;
    const all = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) all.push(i * step || 0);  // not -0
    return all;
  };
  const steps = (point) => (point[0] === point[1] ? "step " + whole(point[0]) : "steps " + whole(point[0]) + "–" + whole(point[1]));
  const middle = (point) => (point[0] + point[1]) / 2;

  // The last step of any series, so that all charts have one axis.
  let lastStep = 1;
  for (const one of data.runs) for (const points of Object.values(one.series)) if (points.length) lastStep = Math.max(lastStep, points[points.length - 1][1]);

  const frame = { left: 66, right: 12, top: 15, bottom: 34 };

  const axes = (svg, width, height, low, high, spec) => {
    const x = (step) => frame.left + ((width - frame.left - frame.right) * step) / lastStep;
    const y = (value) => height - frame.bottom - ((height - frame.top - frame.bottom) * (value - low)) / (high - low || 1);
    const unit = units[spec.unit === "bytes" ? "round_bytes" : spec.unit];
    for (const tick of ticks(low, high, 4)) {
      make("line", { x1: frame.left, x2: width - frame.right, y1: y(tick), y2: y(tick), stroke: "var(--grid)" }, svg);
      make("text", { x: frame.left - 7, y: y(tick) + 4, "text-anchor": "end" }, svg).textContent = unit(tick);
    }
    make("line", { x1: frame.left, x2: width - frame.right, y1: height - frame.bottom, y2: height - frame.bottom, stroke: "var(--muted)" }, svg);
    const digit = 8; // px, at most
    const free = width - frame.right - digit * ("step " + whole(lastStep)).length;
    for (const tick of ticks(0, lastStep, width < 420 ? 3 : 6)) {
      if (x(tick) + (digit / 2) * whole(tick).length > free || tick !== Math.round(tick)) continue;
      make("text", { x: x(tick), y: height - frame.bottom + 16, "text-anchor": "middle" }, svg).textContent = whole(tick);
    }
    make("text", { x: width - frame.right, y: height - frame.bottom + 16, "text-anchor": "end", class: "unit" }, svg).textContent = "step " + whole(lastStep);
    return { x, y };
  };

  // Starts, warnings and stages, where they were.
  const strokes = { restart: { stroke: "var(--muted)", "stroke-dasharray": "5 3" }, stage: { stroke: "var(--ink)", "stroke-dasharray": "none", "stroke-width": 1 } };
  const marks = (svg, x, height) => {
    const seen = new Set();
    let free = frame.left; // for the next name of a stage
    for (const event of run.marks) {
      const at = Math.round(x(event.step));
      const key = event.kind + at;
      if (seen.has(key)) continue;
      seen.add(key);
      const line = make("line", { x1: at, x2: at, y1: frame.top, y2: height - frame.bottom, stroke: "var(--bad)", "stroke-dasharray": "1 4", "stroke-width": 1.5, ...strokes[event.kind] }, svg);
      make("title", {}, line).textContent = event.kind === "restart" ? event.text : event.kind + (event.text ? " " + event.text : "");
      if (event.kind !== "stage" || at < free || event.text.length > 16) continue;
      make("text", { x: at, y: frame.top - 3, class: "stage" }, svg).textContent = event.text;
      free = at + 12 + 8 * event.text.length;
    }
  };

  const path = (points, x, y) => {
    let text = "", pen = "M";
    for (const [at, value] of points) {
      if (value == null) { pen = "M"; continue; }
      text += pen + x(at).toFixed(1) + " " + y(value).toFixed(1);
      pen = "L";
    }
    return text;
  };

  const tips = (plot, svg, width, height, count, place, describe) => {
    const tip = element("div", "", plot, "tip");
    tip.hidden = true;
    let index = count - 1;
    const cursor = make("line", { y1: frame.top, stroke: "var(--ink)", "stroke-width": 1, visibility: "hidden" }, svg);
    const show = (speak) => {
      const at = place(index), text = describe(index);
      cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("y2", height - frame.bottom);
      cursor.setAttribute("visibility", "visible");
      tip.textContent = text;
      tip.hidden = false;
      const room = plot.clientWidth - tip.offsetWidth;
      tip.style.left = Math.max(0, Math.min(room, at > width / 2 ? at - tip.offsetWidth - 10 : at + 10)) + "px";
      tip.style.top = "16px";
      if (speak) live.textContent = text.replaceAll("\n", ", ");
    };
    const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointermove", (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      let best = 0, nearest = Infinity;
      for (let i = 0; i < count; ++i) {
        const distance = Math.abs(place(i) - at);
        if (distance < nearest) { nearest = distance; best = i; }
      }
      index = best;
      show(false);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count, End: count };
      if (event.key === "Escape") return hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      index = Math.max(0, Math.min(count - 1, index + moves[event.key]));
      show(true);
    });
  };

  const figures = (plot, headings, rows) => {
    const details = element("details", undefined, plot);
    element("summary", "The same as a table", details);
    details.addEventListener("toggle", () => {
      if (!details.open || details.dataset.filled) return;
      details.dataset.filled = "yes";
      const box = element("div", undefined, details, "table");
      box.tabIndex = 0;
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "Table of " + headings[1]);
      const table = element("table", undefined, box);
      const head = element("tr", undefined, element("thead", undefined, table));
      for (const heading of headings) element("th", heading, head, "n").scope = "col";
      const body = element("tbody", undefined, table);
      const stride = Math.ceil(rows.length / 40);
      for (let i = 0; i < rows.length; i += stride) {
        const row = element("tr", undefined, body);
        rows[i].forEach((cell) => element("td", cell, row, "n"));
      }
    });
  };

  const legend = (plot, entries, blocks) => {
    const box = element("div", undefined, plot, blocks ? "legend blocks" : "legend");
    for (const [label, swatch] of entries) element("span", label, box).style.setProperty("--swatch", `var(--${swatch})`);
  };

  const board = (plot, width, height, label) => {
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": label }, plot);
    return svg;
  };

  // Runs may report at different steps.
  const nearest = (points, at) => points.reduce((a, b) => (Math.abs(middle(b) - at) < Math.abs(middle(a) - at) ? b : a), points[0]);
  // Whether a run had begun and not ended.
  const reaches = (points, [first, last]) => points[0][0] <= last && first <= points[points.length - 1][1];
  // Lines: each of { label, swatch, points: [[first, last, mean, least, most], ...] }. Of a point whose mean is null no value was a
  // number; one whose mean is undefined is not there.
  const noted = (value, unit) => (value === null ? "not a number" : value === undefined ? "—" : units[unit](value));
  const lines = (plot, spec, all) => {
    const width = plot.clientWidth, height = spec.height || 220;
    let low = spec.zero ? 0 : Infinity, high = -Infinity;
    for (const one of all) for (const point of one.points) {
      if (point[2] == null) continue;
      low = Math.min(low, spec.mean ? point[2] : point[3]);
      high = Math.max(high, spec.mean ? point[2] : point[4]);
    }
    if (high < low) low = 0, high = 1;
    if (high === low) high = low + (Math.abs(low) || 1) * 0.1, low -= spec.zero ? 0 : (Math.abs(low) || 1) * 0.1;
    if (spec.zero || (low >= 0 && low < high * 0.35)) low = 0;
    high += (high - low) * 0.05;
    if (spec.high !== undefined) low = spec.low, high = spec.high;
    const own = all[0].points;
    const final = own[own.length - 1];
    const label = `${spec.title}: ${final && final[2] != null ? units[spec.unit](final[2]) + " at the end, between " + units[spec.unit](Math.max(low, Math.min(...own.map((p) => (p[3] ?? Infinity))))) + " and " + units[spec.unit](Math.max(...own.map((p) => (p[4] ?? -Infinity)))) : "not a number at the end"}. Arrow keys read single values.`;
    const svg = board(plot, width, height, label);
    const { x, y } = axes(svg, width, height, low, high, spec);
    marks(svg, x, height);
    for (const one of [...all].reverse()) {
      const points = one.points;
      if (!spec.mean && points.some((p) => p[2] != null && p[4] - p[3] > 0)) {
        const solid = points.filter((p) => p[2] != null);
        const band = path(solid.map((p) => [middle(p), p[4]]), x, y) + path(solid.map((p) => [middle(p), p[3]]).reverse(), x, y).replace("M", "L") + "Z";
        make("path", { d: band, fill: `var(--${one.swatch})`, opacity: 0.2 }, svg);
      }
      make("path", { d: path(points.map((p) => [middle(p), p[2]]), x, y), fill: "none", stroke: `var(--${one.swatch})`, "stroke-width": one.thin ? 1 : 2, "stroke-linejoin": "round", "stroke-dasharray": one.dash || "none" }, svg);
      if (points.length === 1 && points[0][2] != null) make("circle", { cx: x(middle(points[0])), cy: y(points[0][2]), r: 4, fill: `var(--${one.swatch})` }, svg);
      // Where a value was not a number.
      for (const point of points) if (point[2] === null) make("text", { x: x(middle(point)), y: frame.top + 10, "text-anchor": "middle", style: "fill: var(--bad); font-weight: 700" }, svg).textContent = "×";
    }
    tips(plot, svg, width, height, own.length, (index) => x(middle(own[index])), (index) => steps(own[index]) + all.map((one) => {
      return "\n" + one.label + " " + noted(nearest(one.points, middle(own[index]))[2], spec.unit);
    }).join(""));
    if (all.length > 1) legend(plot, all.map((one) => [one.label, one.swatch]));
    figures(plot, ["step", ...all.map((one) => one.label)], own.map((p) => [whole(p[1]), ...all.map((one) => (reaches(one.points, p) ? noted(nearest(one.points, middle(p))[2], spec.unit) : ""))]));
  };

  // Of a name, in all runs.
  const ofRuns = (name) => data.runs.map((one, i) => ({ label: data.runs.length > 1 ? one.label : name.replaceAll("_", " "), swatch: "s" + (1 + (i % 6)), dash: i ? "6 3" : undefined, points: one.series[name] || [] })).filter((one) => one.points.length);

  const shares = (plot) => {
    const kinds = ["checkpoint", "data", "communication", "compute"];
    const names = ["saving", "data", "communication", "computing"];  // as the summary has them
    const totals = names.map((name, k) => `${name} ${run.total_shares[k]}`).reverse();
    const points = run.shares;
    const width = plot.clientWidth, height = 220;
    const svg = board(plot, width, height, "Where the time of a step goes: " + totals.join(", ") + ". Arrow keys read single values.");
    const { x, y } = axes(svg, width, height, 0, 1, { unit: "share" });
    const below = points.map(() => 0);
    kinds.forEach((kind, k) => {
      const lower = points.map((p, i) => [middle(p), below[i]]);
      points.forEach((p, i) => { below[i] += p[2][k]; });
      const upper = points.map((p, i) => [middle(p), below[i]]);
      // An area of one point has no width: it is shown as a bar.
      for (const edge of [lower, upper]) if (points.length === 1) edge.unshift([edge[0][0] - lastStep / 20, edge[0][1]]);
      make("path", { d: path(upper, x, y) + path(lower.reverse(), x, y).replace("M", "L") + "Z", fill: `var(--${kind})` }, svg);
    });
    marks(svg, x, height);
    tips(plot, svg, width, height, points.length, (index) => x(middle(points[index])), (index) => steps(points[index]) + names.map((name, k) => `\n${name} ${units.share(points[index][2][k])}`).reverse().join(""));
    legend(plot, [...kinds].reverse().map((kind, i) => [totals[i], kind]), true);
  };

  const mix = (from, to, share) => {
    const parse = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
    const a = parse(from), b = parse(to);
    return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * share)).join(",")})`;
  };

  // A row a rank, a column some steps; the colour is the ratio to the median of the column: of an even number the faster one in the middle, so that
  // of two ranks it is the slow one that stands out.
  const heat = (plot) => {
    const { columns, rows, cells } = run.heat;
    const width = plot.clientWidth, left = 74, top = 7, bottom = 26;
    const row = Math.max(rows.length > 40 ? 5 : 12, Math.min(26, 320 / rows.length));
    const height = top + Math.round(row * rows.length) + bottom;
    const canvas = element("canvas", undefined, plot);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.height = height + "px";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", run.heat.says + " Arrow keys read single cells; the table of ranks below has the means.");
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const even = color("even"), fast = color("fast"), slow = color("slow");
    const cell = (width - left) / columns.length;
    const medians = cells.map((column) => { const sorted = column.filter((v) => v !== null).sort((a, b) => a - b); return sorted[(sorted.length - 1) >> 1] || 0; });
    const times = (c, r) => (medians[c] > 0 && cells[c][r] !== null && cells[c][r] !== undefined ? cells[c][r] / medians[c] : null);
    for (let c = 0; c < columns.length; ++c) for (let r = 0; r < rows.length; ++r) {
      const t = times(c, r);
      if (t === null) continue;
      pen.fillStyle = t >= 1 ? mix(even, slow, Math.min(1, (t - 1) / 0.5)) : mix(even, fast, Math.min(1, (1 / t - 1) / 0.5));
      pen.fillRect(left + c * cell, top + r * row, cell + 0.6, row - (row > 8 ? 1 : 0));
    }
    pen.fillStyle = color("muted");
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    // As many names as there is room for, but those of slow ranks always.
    const every = Math.ceil(15 / row);
    const isSlow = rows.map((name, r) => { const all = columns.map((column, i) => times(i, r)).filter((t) => t !== null); return all.reduce((a, b) => a + b, 0) / (all.length || 1) > 1.25; });
    canvas.dataset.slow = rows.filter((name, r) => isSlow[r]).join(", ");
    rows.forEach((name, r) => {
      const near = isSlow.some((slowRow, other) => slowRow && other !== r && Math.abs(other - r) < every);
      if (!isSlow[r] && (r % every !== 0 || near)) return;
      pen.fillStyle = color(isSlow[r] ? "bad" : "muted");
      pen.font = (isSlow[r] ? "bold " : "") + "12px system-ui, 'DejaVu Sans', sans-serif";
      pen.fillText(name, left - 8, top + (r + 0.5) * row);
    });
    pen.fillStyle = color("muted");
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    pen.fillText("step " + whole(columns[0][0]), left, height - 8);
    pen.textAlign = "right";
    pen.fillText("step " + whole(columns[columns.length - 1][1]), width, height - 8);
    const tip = element("div", "", plot, "tip");
    tip.hidden = true;
    let c = columns.length - 1, r = 0;
    const show = (speak) => {
      const t = times(c, r);
      const text = `${rows[r]}, ${steps(columns[c])}\n` + (t === null ? "nothing known" : `works ${units.time(cells[c][r])} a step\n${t.toFixed(2)} times the median of the ranks`);
      tip.textContent = text;
      tip.hidden = false;
      tip.style.left = Math.max(0, Math.min(width - tip.offsetWidth, left + c * cell + 12)) + "px";
      tip.style.top = Math.min(top + r * row + row + 4, height) + "px";
      if (speak) live.textContent = text.replaceAll("\n", ", ");
    };
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      c = Math.floor((event.clientX - box.left - left) / cell);
      r = Math.floor((event.clientY - box.top - top) / row);
      if (c < 0 || c >= columns.length || r < 0 || r >= rows.length) { c = Math.max(0, Math.min(columns.length - 1, c)); r = Math.max(0, Math.min(rows.length - 1, r)); tip.hidden = true; return; }
      show(false);
    });
    for (const end of ["pointerleave", "blur"]) canvas.addEventListener(end, () => { tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-columns.length, 0], End: [columns.length, 0] };
      if (event.key === "Escape") { tip.hidden = true; return; }
      if (!(event.key in moves)) return;
      event.preventDefault();
      c = Math.max(0, Math.min(columns.length - 1, c + moves[event.key][0]));
      r = Math.max(0, Math.min(rows.length - 1, r + moves[event.key][1]));
      show(true);
    });
    const scale = element("div", undefined, plot, "scale");
    element("span", "1.5 times faster", scale);
    element("i", undefined, scale);
    element("span", "1.5 times slower than the median", scale);
  };

  // A line a rank; of many ranks the one that stands out, and what all have. `sign` 1: the one with the most stands out, -1: with the least.
  const ofRanks = (plot, spec, cells, sign, says) => {
    const { rows, columns } = run.heat;
    const point = (column, mean, least, most) => [column[0], column[1], mean ?? undefined, least ?? undefined, most ?? undefined];
    const series = (r) => columns.map((column, c) => point(column, cells[c][r], cells[c][r], cells[c][r]));
    const all = [];
    if (rows.length <= 6) {
      rows.forEach((name, r) => all.push({ label: name, swatch: "s" + (1 + r), dash: ["none", "6 3", "2 3", "9 3 2 3", "4 2", "1 3"][r], points: series(r) }));
    } else {
      const known = (values) => values.filter((value) => value !== null && value !== undefined);
      const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : undefined);
      const last = cells[cells.length - 1];
      const score = rows.map((name, r) => (sign > 0 ? last[r] : mean(known(cells.map((column) => column[r]))))).map((value) => (value == null ? -Infinity : sign * value));
      const top = score.indexOf(Math.max(...score));
      all.push({ label: `${rows[top]} (${says})`, swatch: "s2", points: series(top) });
      all.push({ label: "all ranks: mean, least and most", swatch: "s1", points: columns.map((column, c) => { const v = known(cells[c]); return v.length ? point(column, mean(v), Math.min(...v), Math.max(...v)) : point(column); }) });
    }
    lines(plot, spec, all);
  };

  const charts = {
    loss: (plot) => lines(plot, { title: "Loss", unit: "plain" }, ofRuns("loss")),
    learning_rate: (plot) => lines(plot, { title: "Learning rate", unit: "plain", zero: true }, ofRuns("learning_rate")),
    gradient_norm: (plot) => lines(plot, { title: "Gradient norm", unit: "plain", zero: true }, ofRuns("gradient_norm")),
    throughput: (plot) => lines(plot, { title: "Throughput", unit: "count", zero: true }, ofRuns("samples_per_second")),
    step_time: (plot) => lines(plot, { title: "Step time", unit: "time", zero: true }, ofRuns("step_seconds")),
    memory: (plot) => ofRanks(plot, { title: "Memory", unit: "bytes", zero: true }, run.memory, 1, "most at the end"),
    gpu_busy: (plot) => ofRanks(plot, { title: "GPU use", unit: "share", low: 0, high: 1 }, run.gpu_busy, -1, "least in the mean"),
    shares, heat,
  };
  const drawn = () => {
    for (const plot of document.querySelectorAll(".plot")) {
      if (!plot.clientWidth) continue;
      const held = plot.contains(document.activeElement);
      plot.replaceChildren();
      const name = plot.dataset.chart;
      try {
        if (Object.hasOwn(charts, name)) charts[name](plot);
        else lines(plot, { title: plot.dataset.title, unit: "plain" }, ofRuns(name));
      } catch (fault) { // of one chart: the others are drawn all the same
        plot.replaceChildren();
        element("p", "This chart could not be drawn.", plot, "muted");
        console.error(fault);
      }
      if (held && plot.firstElementChild) plot.firstElementChild.focus();
    }
    document.documentElement.dataset.drawn = "yes";
  };
  drawn();
  let width = window.innerWidth, timer = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(drawn, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawn);
  matchMedia("print").addEventListener("change", drawn);
})();
