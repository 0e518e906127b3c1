// What all reports have: buttons that copy, the theme, and tables that are sorted and filtered. Names come from files
// that nobody vouches for: they become textContent, or are drawn, and are never markup.

const count = number => number.toLocaleString("en");
const element = (tag, name = "", ...inside) => {
  const made = document.createElement(tag);
  made.className = name;
  made.append(...inside);
  return made;
};
const button = (text, act) => {
  const made = element("button", "", text);
  made.type = "button";
  made.onclick = act;
  return made;
};
const described = facts => element("dl", "", ...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
const unpack = async script => {
  if (script.type === "application/json") return JSON.parse(script.textContent);
  const bytes = Uint8Array.from(atob(script.textContent), character => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};

// -- the theme

const theme = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)"), { dataset } = document.documentElement;
const isDark = () => dataset.theme ? dataset.theme === "dark" : dark.matches;
const draws = [];  // what draws again if the colours or the width change
const redraw = () => {
  theme.textContent = isDark() ? "Light" : "Dark";
  for (const draw of draws) draw();
};
addEventListener("resize", redraw);
dark.onchange = redraw;
theme.onclick = () => {
  dataset.theme = isDark() ? "light" : "dark";
  redraw();
};
theme.hidden = false;
redraw();

// -- what is to be copied

for (const code of document.querySelectorAll(".tl-code code")) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {  // not allowed, as in some mail programs
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
  });
  copy.classList.add("copy");
  code.after(copy);
}

// -- tables

const { compare } = new Intl.Collator("en", { numeric: true });
const POWERS = { kB: 1, MB: 2, GB: 3, TB: 4, PB: 5, thousand: 1, million: 2, billion: 3, trillion: 4 };
const numberIn = text => {  // "1.35 GB", "12,345", "6.7 billion", "1e-05"; what is no number comes last
  const [, number, unit] = /^([-+]?[\d.,]+(?:e[-+]?\d+)?) ?(\w*)/.exec(text) ?? [];
  return number ? parseFloat(number.replaceAll(",", "")) * 1000 ** (POWERS[unit] ?? 0) : /^-?inf/.test(text) ? Infinity : -Infinity;
};
const sorted = (rows, value, down) => {
  const keys = new Map(rows.map(row => [row, value(row)])), numeric = typeof keys.values().next().value === "number";
  const order = numeric ? (a, b) => keys.get(a) - keys.get(b) || 0 : (a, b) => compare(keys.get(a), keys.get(b));
  return [...rows].sort((a, b) => (down ? -1 : 1) * order(a, b));
};
// A click on a title sorts, another one in the other direction, and the third not at all.
const sortable = (titles, isLarge, sort) => titles.forEach((title, i) => {
  title.ariaSort = "none";
  title.onclick = () => {
    const ways = ["none", "ascending", "descending", "none"], step = isLarge(i) ? -1 : 1;
    const way = ways.at(ways.indexOf(title.ariaSort, step < 0 && title.ariaSort === "none" ? 1 : 0) + step);
    for (const other of titles) other.ariaSort = "none";
    title.ariaSort = way;
    sort(way === "none" ? -1 : i, way === "descending");
  };
});

for (const table of document.querySelectorAll(".wide table")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead?.rows[0].cells ?? []];
  const isRight = i => heads[i].classList.contains("num");
  if (rows.length < 3) continue;
  const titles = heads.map(head => {
    const title = button(head.textContent);
    head.replaceChildren(title);
    return title;
  });
  sortable(titles, isRight, (i, down) => {
    const value = ({ cells }) => isRight(i) ? numberIn(cells[i].textContent) : cells[i]?.textContent ?? "";
    body.replaceChildren(...i < 0 ? rows : sorted(rows, value, down));
  });
}

// A list of which only the rows in sight are in the page. Of a field: its name, the text or element of a row, and the
// value by which it is sorted, large ones first if it is right-aligned.
const list = (parent, fields, label, click) => {
  const sheet = element("div", "window"), filler = element("div", "filler", sheet), body = element("div", "body", filler);
  const titles = fields.map(({ name, kind }) => {
    const title = button(name);
    title.className = kind;
    return title;
  });
  let given = [], shown = [], by = -1, down = false, frame = 0;
  const paint = () => {
    const high = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
    filler.style.height = shown.length * high + "px";
    const first = Math.max(0, Math.floor(body.scrollTop / high) - 10);
    const last = Math.ceil((body.scrollTop + body.clientHeight) / high) + 10;
    sheet.style.transform = `translateY(${first * high}px)`;
    sheet.replaceChildren(...shown.slice(first, last).map((row, i) => {
      const line = element("div", (first + i) % 2 ? "row odd" : "row", ...fields.map(({ kind, cell }) => {
        const made = element("span", kind, cell(row));
        made.role = "cell";
        return made;
      }));
      line.role = "row";
      line.ariaRowIndex = first + i + 1;
      line.onclick = () => click(row);
      return line;
    }));
    body.ariaRowCount = shown.length;
    frame = 0;
  };
  const show = rows => {
    given = rows;
    shown = by < 0 ? rows : sorted(rows, fields[by].value, down);
    body.scrollTop = 0;
    paint();
  };
  sortable(titles, i => fields[i].isLarge, (i, isDown) => {
    [by, down] = [i, isDown];
    show(given);
  });
  body.onscroll = () => frame ||= requestAnimationFrame(paint);
  body.tabIndex = 0;
  body.role = "table";
  body.ariaLabel = label;
  const head = element("div", "row head", ...titles);
  head.hidden = !fields.some(({ name }) => name);
  parent.append(head, body);
  parent.style.setProperty("--columns", fields.map(({ wide }) => `minmax(0,${wide}fr)`).join(" "));
  parent.style.setProperty("--rest", Math.min(5, Math.max(1, fields.length - 1)));  // below the name, on a narrow screen
  return { show, paint };
};

const NS = "http://www.w3.org/2000/svg";
const plotted = ([start, counts, end]) => {  // how many numbers are how large, as html.plot
  const svg = document.createElementNS(NS, "svg"), path = svg.appendChild(document.createElementNS(NS, "path"));
  const most = Math.max(...counts), name = `${start} … ${end}`;
  svg.setAttribute("class", "tl-plot");
  svg.setAttribute("viewBox", `0 0 ${counts.length} 16`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.appendChild(document.createElementNS(NS, "title")).textContent = name;
  path.setAttribute("d", counts.map((number, i) => number ? `M${i} 16V${(16 - Math.max(1, 16 * number / most)).toFixed(2)}H${i + 1}V16` : "").join(""));
  return element("span", "plot", element("span", "tl-dim", start), svg, element("span", "tl-dim", end));
};

// A long table that comes as data: a cell is a text, a text with its role, or a plot.
const fill = async card => {
  const { titles, right, rows } = await unpack(card.querySelector("script.data")), input = card.querySelector("input");
  const textOf = cell => typeof cell === "string" ? cell : cell?.plot ? "" : cell?.[0] ?? "";
  const draw = cell => cell?.plot ? plotted(cell.plot) : element("span", Array.isArray(cell) && cell[1] ? `tl-${cell[1]} ink` : "", textOf(cell));
  const texts = new Map(rows.map(row => [row, row.map(textOf).join(" ").toLowerCase()]));
  const fields = Array.from({ length: Math.max(...rows.map(row => row.length)) }, (_, i) => {
    const isLarge = right.includes(i), isPlot = rows.some(row => row[i]?.plot);
    const longest = rows.reduce((most, row) => Math.max(most, textOf(row[i]).length), 0);
    return { name: titles[i] ?? "", kind: isLarge ? "f-bytes" : i ? "f-word" : "f-name", isLarge,
      wide: isPlot ? 22 : Math.max(8, Math.min(longest, i ? 32 : 60)),
      cell: row => draw(row[i]), value: row => isLarge ? numberIn(textOf(row[i])) : textOf(row[i]),
      isEmpty: !isPlot && !longest };
  }).filter(({ isEmpty }) => !isEmpty);
  const panel = card.querySelector(".detail");
  card.hidden = false;
  const { show, paint } = list(card.querySelector(".table"), fields, "Rows", row => {
    const facts = row.map((cell, i) => [titles[i] ?? "", draw(cell)]).filter(([, { textContent }]) => textContent);
    panel.replaceChildren(described(facts), button("Close", () => panel.replaceChildren()));
  });
  input.oninput = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    show(rows.filter(row => words.every(word => texts.get(row).includes(word))));
  };
  show(rows);
  draws.push(paint);
};
const failed = (place, error) => place.append(element("p", "card", `This browser cannot show all of this: ${error.message}`));
await Promise.all([...document.querySelectorAll(".grid")].map(card => fill(card).catch(error => {
  card.hidden = false;
  failed(card, error);
})));

const ready = () => {
  dataset.ready = "yes";
  performance.mark("ready");
};
