// Draws the plots of the page with uPlot, from the values that stand in it. Without it the page shows the pictures.
(() => {
  const drawn = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const LOOKS = {
    reference: { width: 5, points: 9 },
    candidate: { width: 1.75, dash: [5, 3], points: 5 },
    both: { width: 2, points: 5 },
    bound: { width: 1.5, dash: [6, 4], points: 0 },
    within: { points: 7, alone: true },
    over: { points: 10, alone: true },
  };

  function seriesOf(chart) {
    return chart.series.map((one) => {
      const look = LOOKS[one.role];
      const stroke = colour(one.role);
      return {
        label: one.label,
        stroke,
        width: look.width || 0,
        dash: look.dash,
        paths: look.alone ? () => null : undefined,
        points: { show: look.points > 0 && (look.alone || chart.x.length <= 60), size: look.points, fill: stroke, stroke },
      };
    });
  }

  // As wide as the longest number beside the axis.
  function widthOfNumbers(plot, values, at, cycle) {
    const axis = plot.axes[at];
    if (cycle > 1) return axis._size;
    const longest = (values || []).reduce((most, value) => (value && value.length > most.length ? value : most), "");
    plot.ctx.font = axis.font[0];
    return Math.ceil(14 + axis.ticks.size + axis.gap + plot.ctx.measureText(longest).width / devicePixelRatio);
  }

  const WHOLE = [1, 2, 5].flatMap((n) => [...Array(16).keys()].map((at) => n * 10 ** at)).sort((a, b) => a - b);

  function axesOf(chart) {
    const line = { stroke: colour("grid"), width: 1 };
    const look = { stroke: colour("ink"), grid: line, ticks: line };
    const steps = {
      ...look,
      incrs: WHOLE,
      values: (plot, splits) => splits.map((value) => (Number.isInteger(value) ? String(value) : "")),
    };
    const counts = chart.series.every((one) => one.y.every((value) => value === null || Number.isInteger(value)));
    const values = {
      ...look,
      ...(counts && { incrs: WHOLE }),
      size: widthOfNumbers,
      space: 24,
      values: (plot, splits) => splits.map((value) => (value === null ? "" : String(Number(value.toPrecision(6))))),
    };
    if (chart.ticks) {
      values.splits = () => chart.ticks.map(([height]) => height);
      values.values = () => chart.ticks.map(([, label]) => label);
      values.filter = (plot, splits) => splits;
    }
    return [steps, values];
  }

  function read(chart, readout, at) {
    const half = ((chart.stretch || 1) - 1) / 2;
    const steps = half ? `steps ${chart.x[at] - half} to ${chart.x[at] + half}` : `step ${chart.x[at]}`;
    readout.replaceChildren(element("b", "", steps));
    for (const one of chart.series) {
      if (one.y[at] === null) continue;
      const value = one.shown ? one.shown[at] : one.y[at];
      const shown = one.shown ? (value === null ? "" : value === 0 ? "0" : value.toExponential(2)) : String(value);
      const part = element("span", one.role, `${one.label}${shown === "" ? "" : ` ${shown}`}`);
      readout.append(" ", part);
    }
  }

  // What is read before anybody points: the first difference, or the last step.
  function place(chart, step) {
    if (step === null) return chart.x.length - 1;
    const apart = chart.x.map((x) => Math.abs(x - step));
    return apart.indexOf(Math.min(...apart));
  }

  function draw(chart, key, step, box) {
    const area = element("div", "area");
    const readout = element("p", "readout");
    readout.setAttribute("aria-live", "polite");
    box.append(readout, area);
    for (const one of chart.series) if (one.odd) box.append(element("p", "odd", one.odd));
    let last = place(chart, step);
    const options = {
      width: Math.max(200, area.clientWidth),
      height: 190,
      legend: { show: false },
      cursor: { sync: { key }, drag: { x: true, y: false }, y: false },
      scales: {
        x: { time: false, range: (plot, low, high) => {
          const edge = Math.max(0.2, 0.02 * (high - low));
          return [low - edge, high + edge];
        } },
        ...(chart.range && { y: { range: () => chart.range } }),
      },
      series: [{}, ...seriesOf(chart)],
      axes: axesOf(chart),
      hooks: {
        setCursor: [(plot) => {
          if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) read(chart, readout, (last = plot.cursor.idx));
        }],
      },
    };
    const plot = new uPlot(options, [chart.x, ...chart.series.map((one) => one.y)], area);
    read(chart, readout, last);
    const point = (at) => {
      last = Math.min(chart.x.length - 1, Math.max(0, at));
      plot.setCursor({ left: plot.valToPos(chart.x[last], "x"), top: 10 }, true, true);
      read(chart, readout, last);
    };
    area.tabIndex = 0;
    area.setAttribute("role", "img");
    area.setAttribute("aria-label", `${chart.title}: the arrow keys read it step by step`);
    area.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: last - 1, ArrowRight: last + 1, Home: 0, End: chart.x.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      point(to);
    });
    const touched = (event) => {
      const left = event.touches[0].clientX - plot.over.getBoundingClientRect().left;
      plot.setCursor({ left, top: 10 }, true, true);
    };
    for (const name of ["touchstart", "touchmove"]) plot.over.addEventListener(name, touched, { passive: true });
    new ResizeObserver(() => {
      if (area.clientWidth && area.clientWidth !== plot.width) plot.setSize({ width: area.clientWidth, height: 190 });
    }).observe(area);
    drawn.push(plot);
  }

  function all() {
    for (const plot of drawn.splice(0)) plot.destroy();
    for (const holder of document.querySelectorAll("script.values")) {
      const { key, step, charts } = JSON.parse(holder.textContent);
      const figure = holder.parentNode;
      figure.querySelector(".plots")?.remove();
      const grid = element("div", "plots");
      figure.prepend(grid);
      figure.classList.add("live");
      for (const chart of charts) {
        const box = element("div", chart.said ? "plot said" : "plot");
        box.append(element("h4", "", chart.title));
        grid.append(box);
        if (chart.said) box.append(element("p", "readout", chart.said));
        else draw(chart, key, step, box);
      }
    }
  }

  all();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
