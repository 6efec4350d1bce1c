"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const family = document.getElementById("family");
  const batch = document.getElementById("batch");
  const rowsOf = page.rows.map((packed) => packed.map((values) => {
    const row = {};
    page.columns.forEach((name, i) => { row[name] = values[i]; });
    return row;
  }));
  window.charts = {};
  window.ready = false;

  const current = () => page.families[family ? Number(family.value) : 0];
  const belongs = {
    throughput: () => true,
    efficiency: (row) => row.efficiency !== null,
    split: (row) => row.compute !== null,
    bus: (row) => row.bus !== null && row.nodes > 1,
  };

  // A curve needs no more points than a screen can tell apart; the table and the exports have all.
  function drawn(rows) {
    const counts = [...new Set(rows.map((row) => row.nodes))].sort((a, b) => a - b);
    if (counts.length <= page.most_counts) return null;
    const kept = new Set();
    for (let i = 0; i < page.most_counts; i += 1) {
      kept.add(counts[Math.round((i * (counts.length - 1)) / (page.most_counts - 1))]);
    }
    document.getElementById("thinned").textContent =
      `The plots show ${kept.size} of ${counts.length} node counts; the table and bench export have all.`;
    return kept;
  }

  function select(name) {
    const chosen = current();
    const all = rowsOf[chosen.group];
    let rows = name === "variants" ? all : all.filter((row) => row.variant === chosen.variant && belongs[name](row));
    if (page.one_batch.includes(name)) rows = rows.filter((row) => row.group === Number(batch.value));
    const kept = drawn(rows);
    if (kept) rows = rows.filter((row) => kept.has(row.nodes));
    if (name === "variants" && new Set(rows.map((row) => row.variant)).size < 2) rows = [];
    return rows;
  }

  function wrap(text, most) {
    const lines = [];
    for (const word of text.split(" ")) {
      const last = lines.length - 1;
      if (last >= 0 && (lines[last] + " " + word).length <= most) lines[last] += " " + word;
      else lines.push(word);
    }
    return lines;
  }

  const panelsOf = (rows, name) => new Set(rows.map((row) => (page.by_batch.includes(name) ? row.group : row.fabric))).size;

  function fit(spec, rows, name, width) {
    const panels = panelsOf(rows, name);
    const columns = Math.max(1, Math.min(panels, Math.floor(width / 290)));
    const own = name === "bus" ? 62 : 24;
    const axis = name === "bus" ? 0 : 48;
    spec.columns = columns;
    spec.spec.width = Math.floor(Math.max(150, Math.min(640, (width - axis - own * columns) / columns)));
    spec.spec.height = width < 500 ? 200 : 240;
    // A layer without a single value would have a scale without end.
    const known = (field) => rows.some((row) => !(field in row) || row[field] !== null);
    spec.spec.layer = spec.spec.layer.filter((layer) => known((layer.encoding.y || {}).field || ""));
    const counts = [...new Set(rows.map((row) => row.nodes))].sort((a, b) => a - b);
    if (counts.length > 1) spec.spec.layer = spec.spec.layer.filter((layer) => layer.name !== "single");
    // The ticks that plots.count_axis sets.
    for (const { encoding: { x } } of spec.spec.layer) {
      if (x && x.field === "nodes" && x.type === "quantitative" && counts.length <= page.most_ticks) x.axis.values = counts;
    }
    const chosen = current();
    const letters = Math.floor(width / 7.2);
    const lines = Object.entries(page.lines[name] || {}).filter(([field]) => rows.some((row) => row[field] !== null));
    const named = lines.length ? ` (${lines.map(([, text]) => text).join(", ")})` : "";
    spec.title.text = wrap(page.titles[name] + named, Math.floor((width - 40) / 9.5));
    if (!chosen.caveat) spec.title.subtitleColor = page.grey;
    spec.title.subtitle = [chosen.label, chosen.caveat].filter(Boolean).flatMap((line) => wrap(line, letters));
    if (width < 500 && name === "variants") eachLegend(spec, (legend) => { legend.columns = 1; });
    return spec;
  }

  function eachLegend(node, change) {
    if (!node || typeof node !== "object") return;
    if (node.legend) change(node.legend);
    Object.values(node).forEach((child) => eachLegend(child, change));
  }

  async function draw() {
    window.ready = false;
    document.getElementById("thinned").textContent = "";
    const style = dark.matches ? page.style.dark : page.style.light;
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const name = figure.dataset.chart;
      const rows = select(name);
      figure.hidden = rows.length === 0;
      if (figure.hidden) { delete window.charts[name]; continue; }
      figure.classList.toggle("half", innerWidth > 900 && panelsOf(rows, name) === 1);
      const place = figure.querySelector(".plot");
      const spec = fit(JSON.parse(JSON.stringify(page.specs[name])), rows, name, place.clientWidth);
      spec.data = { name: "rows", values: rows };
      const result = await vegaEmbed(place, spec, {
        // The interpreter needs no eval, so the page's policy can forbid it.
        ast: true,
        config: style,
        renderer: rows.length > 1500 ? "canvas" : "svg",
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: name,
        tooltip: { theme: dark.matches ? "dark" : "light" },
      });
      window.charts[name] = { view: result.view, rows: rows.length };
    }
    window.ready = true;
  }

  function element(kind, name, ...content) {
    const made = document.createElement(kind);
    if (name) made.className = name;
    made.append(...content);
    return made;
  }

  // The verdict, its reason, the cards and the findings of the chosen family, as the template writes those of the first.
  function fillVerdict() {
    const chosen = current();
    const verdict = document.getElementById("verdict");
    verdict.dataset.limit = chosen.limit;
    verdict.replaceChildren(...chosen.parts.map((part) => {
      if (!part.key) return part.text;
      const figure = element("b", part.source, part.text);
      figure.dataset.key = part.key;
      figure.dataset.value = part.value;
      if (part.source === "predicted") figure.title = "predicted, not measured";
      return figure;
    }));
    const why = document.getElementById("why");
    why.textContent = chosen.findings[0] || "";
    why.hidden = !chosen.findings.length;
    const list = document.querySelector("ul.findings");
    list.replaceChildren(...chosen.findings.slice(1).map((line) => element("li", "", line)));
    list.hidden = chosen.findings.length < 2;
    const cards = document.querySelector(".cards");
    cards.replaceChildren(...chosen.cards.map((card) => {
      const made = element("div", "card", element("div", "name", card.title),
        element("div", "big", `${card.big} `, element("small", "", card.unit)));
      made.dataset.fabric = card.fabric;
      if (card.share !== null) {
        const bar = element("i", "");
        bar.style.width = `${card.width}%`;
        bar.style.setProperty("--tone", card.tone);
        made.append(element("div", "track", bar));
      }
      made.append(element("div", "facts", card.facts));
      return made;
    }));
    cards.hidden = !chosen.cards.length;
    document.getElementById("headline").textContent = chosen.headline;
  }

  function fillTable() {
    const chosen = current();
    const rows = rowsOf[chosen.group].filter((row) => row.variant === chosen.variant);
    const body = document.querySelector("#points tbody");
    if (!body) return;
    body.replaceChildren();
    for (const row of rows.slice(0, page.most_rows)) {
      const line = body.insertRow();
      for (const [text, small, left] of page.cells.map((cell) => shown(cell, row))) {
        const cell = line.insertCell();
        cell.textContent = text;
        if (left) cell.className = "text";
        if (small) {
          const between = document.createElement("span");
          between.className = "between";
          between.textContent = " " + small;
          cell.append(between);
        }
      }
    }
    const note = document.getElementById("more");
    note.textContent = rows.length > page.most_rows
      ? `First ${page.most_rows} of ${rows.length} points; bench export writes all of them.` : "";
  }

  const number = (value, digits) => (value === null ? "-" : value.toLocaleString("en", { maximumSignificantDigits: digits }));
  const share = (value) => (value === null ? "-" : (100 * value).toFixed(1) + "%");
  function shown(cell, row) {
    const value = row[cell.field];
    if (cell.kind === "text") return [String(value ?? ""), "", true];
    if (cell.kind === "share") return [share(value), cell.low && value !== null ? `${share(row[cell.low])} to ${share(row[cell.high])}` : "", false];
    const between = cell.low && row[cell.low] !== null ? `${number(row[cell.low], 4)} to ${number(row[cell.high], 4)}` : "";
    return [number(value, cell.kind === "whole" ? 12 : 4), between, false];
  }

  function fillBatches() {
    const chosen = current();
    const known = [...new Set(rowsOf[chosen.group].filter((r) => r.variant === chosen.variant).map((r) => r.group))].sort((a, b) => a - b);
    const middle = known[Math.floor((known.length - 1) / 2)];
    batch.replaceChildren(...known.map((value) => new Option(String(value), String(value), false, value === middle)));
    batch.parentElement.hidden = known.length < 2;
  }

  if (!page.families.length) { window.ready = true; return; }
  fillBatches();
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 150);
  });
  dark.addEventListener("change", draw);
  if (family) family.addEventListener("change", () => { fillVerdict(); fillBatches(); fillTable(); draw(); });
  batch.addEventListener("change", draw);
  draw();
})();
