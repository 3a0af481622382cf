"use strict";
{
  const $ = (id) => document.getElementById(id);

  // The claims of one verdict.
  const filters = document.querySelectorAll("[data-show]");
  const show = (wanted) => {
    for (const button of filters) button.setAttribute("aria-pressed", String(button.dataset.show === wanted));
    for (const claim of document.querySelectorAll(".claim")) claim.hidden = wanted !== "" && claim.dataset.verdict !== wanted;
    for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".claim:not([hidden])");
  };
  for (const button of filters) button.addEventListener("click", () => show(button.dataset.show));
  // A link to a claim that the filter hides shows it.
  const reveal = () => {
    const target = location.hash && $(decodeURIComponent(location.hash.slice(1)));
    if (target && target.closest(".claim[hidden]")) { show(""); target.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);

  // Tables, sorted by a column.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const value = (row, column) => row.cells[column].dataset.order ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [Number(a), Number(b)];
      if (a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return x - y;
      return String(a).localeCompare(String(b), undefined, { numeric: true });
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const missing = (row) => ["None", "nan", "–"].includes(value(row, column));
      rows.sort((a, b) => missing(a) - missing(b) || (down ? -1 : 1) * compare(value(a, column), value(b, column)));
      table.tBodies[0].append(...rows);
    }));
  }

  // Figures, enlarged and saved.
  const dialog = $("large");
  const enlarge = (image) => {
    const copy = new Image();
    copy.src = image.src;
    copy.alt = image.alt;
    dialog.querySelector(".large-view").replaceChildren(copy);
    dialog.showModal();
  };
  for (const image of document.querySelectorAll("img.zoomable")) image.addEventListener("click", () => enlarge(image));
  for (const button of document.querySelectorAll(".enlarge")) {
    button.addEventListener("click", () => enlarge($(button.dataset.figure).querySelector("img")));
  }
  $("large-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  const save = (address, name) => {
    const link = document.createElement("a");
    link.href = address;
    link.download = name;
    link.click();
  };
  for (const link of document.querySelectorAll("[data-download]")) link.addEventListener("click", (event) => {
    event.preventDefault();
    save(link.closest("figure").querySelector("img").src, link.dataset.download);
  });
  for (const link of document.querySelectorAll("[data-json]")) link.addEventListener("click", (event) => {
    event.preventDefault();
    save(URL.createObjectURL(new Blob([$(link.dataset.json).textContent], { type: "application/json" })), "curves.json");
  });

  // On paper everything is open.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of closed) each.open = false; });

  // The curves.
  if ($("curves-data")) {
    const data = JSON.parse($("curves-data").textContent);
    const [width, height, left, bottom, top, right] = [340, 245, 52, 41, 8, 8];
    const experimentChoice = $("curves-experiment"), quantityChoice = $("curves-quantity");
    for (const [i, e] of data.experiments.entries()) experimentChoice.add(new Option(e.title, i));
    for (const [name, title] of Object.entries(data.quantities)) quantityChoice.add(new Option(title, name));
    const colour = (method) => (data.looks[method].colour === "#000000" ? "var(--ink)" : data.looks[method].colour);
    const draw = (name, attributes, parent) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      parent.append(node);
      return node;
    };
    const short = (value) => {
      if (value === null || value === undefined) return "–";
      if (value === 0) return "0";
      const size = Math.abs(value);
      return size >= 1e4 || size < 1e-3 ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(3)));
    };
    // Of 1, 2 and 5 times a power of ten, the smallest step that cuts the range into at most five.
    const step = (high) => {
      const power = 10 ** Math.floor(Math.log10(high / 5));
      return [1, 2, 5, 10].map((digit) => digit * power).find((size) => high / size <= 5 + 1e-9);
    };
    let chosen = new Set();
    let reading = null; // {panel, t}: what the read-out shows; it stays when the quantity or the methods change

    const methodsOf = (experiment) =>
      Object.keys(data.looks).filter((m) => experiment.panels.some((panel) => panel.curves[m]));

    const range = (experiment, quantity, log) => {
      let [low, high] = [Infinity, -Infinity];
      for (const panel of experiment.panels) for (const m of chosen) for (const v of panel.curves[m]?.[quantity]?.mean ?? []) {
        if (v === null || (log && v <= 0) || v > 1e12) continue;
        low = Math.min(low, v);
        high = Math.max(high, v);
      }
      if (low > high) return log ? [0.1, 1] : [0, 1];
      if (!log) return [0, Math.ceil(high / step(high || 1)) * step(high || 1) || 1];
      low = Math.max(low, high * 1e-14);
      return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
    };

    const drawPanel = (experiment, panel, quantity) => {
      const log = quantity !== "step_size";
      const shown = [...chosen].filter((m) => panel.curves[m]?.[quantity]);
      const last = Math.max(...Object.values(panel.curves).map((c) => c.t.at(-1)));
      const [low, high] = range(experiment, quantity, log);
      const x = (t) => left + (width - left - right) * (last > 1 ? Math.log10(t) / Math.log10(last) : 0);
      const share = log ? (v) => Math.log10(v / low) / Math.log10(high / low) : (v) => (v - low) / (high - low);
      const y = (v) => height - bottom - (height - bottom - top) * Math.min(Math.max(share(v), -0.02), 1.02);

      const box = document.createElement("div");
      box.className = "panel";
      const title = document.createElement("h3");
      title.textContent = panel.title;
      box.append(title);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img" }, box);
      svg.setAttribute("aria-label", `${data.quantities[quantity]} by iteration, ${panel.title}: ${shown.join(", ")}`);
      for (let t = 1; t <= last; t *= 10) {
        draw("line", { x1: x(t), x2: x(t), y1: top, y2: height - bottom, class: "grid" }, svg);
        draw("text", { x: x(t), y: height - 24, "text-anchor": "middle" }, svg).textContent = t >= 1e4 ? `1e${Math.round(Math.log10(t))}` : t;
      }
      draw("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, svg).textContent = "iteration";
      const decades = Math.round(Math.log10(high / low)), every = Math.ceil(decades / 6);
      const within = decades <= 2 ? [1, 2, 5] : [1];
      const ticks = log
        ? Array.from({ length: Math.floor(decades / every) + 1 }, (_, i) => low * 10 ** (i * every))
          .flatMap((power) => within.map((digit) => digit * power)).filter((v) => v <= high * (1 + 1e-9))
        : Array.from({ length: Math.round(high / step(high)) + 1 }, (_, i) => i * step(high));
      for (const v of ticks) {
        draw("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "grid" }, svg);
        draw("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, svg).textContent =
          log ? (Math.abs(Math.log10(v)) < 3.5 ? Number(v.toPrecision(1)) : Number(v.toPrecision(1)).toExponential().replace("e+", "e"))
            : short(Number(v.toPrecision(6)));
      }
      for (const m of shown) {
        const { t } = panel.curves[m], { mean, low: least, high: most } = panel.curves[m][quantity];
        const drawable = (v) => v !== null && (!log || v > 0) && v <= 1e12;
        const path = (values) => {
          let d = "", pen = false;
          values.forEach((v, i) => {
            if (drawable(v)) { d += `${pen ? "L" : "M"}${x(t[i]).toFixed(1)} ${y(v).toFixed(1)}`; pen = true; } else pen = false;
          });
          return d;
        };
        if (least) {
          const good = t.map((_, i) => i).filter((i) => drawable(least[i]) && drawable(most[i]));
          const points = [...good.map((i) => [x(t[i]), y(most[i])]), ...good.reverse().map((i) => [x(t[i]), y(least[i])])];
          draw("polygon", { points: points.map((p) => p.map((c) => c.toFixed(1)).join()).join(" "), fill: colour(m), opacity: 0.13 }, svg);
        }
        draw("path", {
          d: path(mean), fill: "none", stroke: colour(m), "stroke-width": data.looks[m].width,
          "stroke-dasharray": data.looks[m].dashes, "data-method": m,
        }, svg);
      }
      const cursor = draw("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" }, svg);
      const dots = draw("g", {}, svg);
      let at = null;
      const read = (t) => {
        at = Math.min(Math.max(t, 1), last);
        reading = { panel: panel.title, t: at };
        dots.replaceChildren();
        if (!shown.length) {
          $("curves-readout").replaceChildren(`${panel.title}: none of the chosen methods has this quantity.`);
          return;
        }
        const found = shown.map((m) => {
          const times = panel.curves[m].t;
          const i = times.reduce((best, each, j) => (Math.abs(Math.log(each / at)) < Math.abs(Math.log(times[best] / at)) ? j : best), 0);
          return { m, t: times[i], v: panel.curves[m][quantity].mean[i], note: panel.curves[m].diverged };
        }).sort((a, b) => (a.v ?? Infinity) - (b.v ?? Infinity));
        const here = found[0].t;
        cursor.setAttribute("x1", x(here));
        cursor.setAttribute("x2", x(here));
        cursor.setAttribute("visibility", "visible");
        const readout = $("curves-readout");
        readout.replaceChildren(`${panel.title}, iteration ${here.toLocaleString("en")}: `);
        for (const { m, t: time, v, note } of found) {
          if (v !== null && v <= 1e12 && (!log || v > 0)) draw("circle", { cx: x(time), cy: y(v), r: 3.5, fill: colour(m) }, dots);
          const item = document.createElement("span");
          item.append(swatch(m), `${m} ${short(v)}${note ? ` (${note})` : ""}`);
          readout.append(item);
        }
      };
      svg.addEventListener("pointermove", (event) => {
        const place = svg.getBoundingClientRect();
        const px = ((event.clientX - place.left) / place.width) * width;
        read(10 ** (((px - left) / (width - left - right)) * Math.log10(last)));
      });
      svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); dots.replaceChildren(); });
      svg.addEventListener("keydown", (event) => {
        const factor = { ArrowRight: 1.25, ArrowLeft: 0.8, Home: 0, End: Infinity }[event.key];
        if (factor === undefined) return;
        event.preventDefault();
        read(factor === 0 ? 1 : factor === Infinity ? last : (at ?? last) * factor);
      });
      if (reading?.panel === panel.title) read(reading.t);
      return box;
    };

    const swatch = (m) => {
      const holder = document.createElement("span");
      holder.className = "swatch";
      holder.style.margin = "0 .35rem 0 0";
      holder.setAttribute("aria-hidden", "true");
      const svg = draw("svg", { width: 26, height: 11 }, holder);
      draw("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour(m), "stroke-width": 3, "stroke-dasharray": data.looks[m].dashes }, svg);
      return holder;
    };

    const redraw = () => {
      const experiment = data.experiments[experimentChoice.value];
      $("curves-panels").replaceChildren(...experiment.panels.map((panel) => drawPanel(experiment, panel, quantityChoice.value)));
    };
    const offer = () => {
      const experiment = data.experiments[experimentChoice.value];
      chosen = new Set(methodsOf(experiment).filter((m) => experiment.main.includes(m)));
      $("curves-methods").replaceChildren(...methodsOf(experiment).map((m) => {
        const button = document.createElement("button");
        button.type = "button";
        button.append(swatch(m), m);
        button.setAttribute("aria-pressed", String(chosen.has(m)));
        button.addEventListener("click", () => {
          if (!chosen.delete(m)) chosen.add(m);
          button.setAttribute("aria-pressed", String(chosen.has(m)));
          redraw();
        });
        return button;
      }));
      reading = null;
      $("curves-readout").replaceChildren("Point at a panel to read its curves.");
      redraw();
    };
    experimentChoice.addEventListener("change", offer);
    quantityChoice.addEventListener("change", redraw);
    offer();
  }
}
