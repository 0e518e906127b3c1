// The report of a checkpoint: a map of its bytes, the list of its tensors, and the layout of its files. It follows
// page.js, which has what other reports have, too.

const MOST_BOXES = 2000, LEAST_BOX = 64, MOST_CHILDREN = 600, MOST_STRIPS = 64, COLOURS = 7;
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

const size = bytes => {
  let unit = 0;
  for (; bytes >= 999.5 && unit < 5; unit++) bytes /= 1000;
  return bytes.toFixed(!unit || bytes >= 99.95 ? 0 : bytes >= 9.995 ? 1 : 2) + " " + UNITS[unit];
};
const tensors = number => `${count(number)} ${number === 1 ? "tensor" : "tensors"}`;
const sum = (things, value) => things.reduce((total, thing) => total + value(thing), 0);
const legend = (parent, entries) => parent.replaceChildren(...entries.map(([colour, text]) => {
  const swatch = element("i");
  swatch.style.background = `var(--${colour})`;
  return element("span", "", swatch, text);
}));
const tip = document.body.appendChild(element("div", "tip"));
tip.hidden = true;
const hint = (event, lines) => {
  tip.hidden = !lines.length;
  tip.textContent = lines.join("\n");
  const { width, height } = tip.getBoundingClientRect(), y = event.clientY;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
};
const probe = document.body.appendChild(element("i"));
const colour = name => {  // as the browser resolves it, light or dark
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};
const penOf = (canvas, height) => {
  const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  pen.scale(scale, scale);
  return pen;
};

// -- the data: pieces are storages and other records, rows are tensors; html_report.columns describes what comes in

const read = ({ pieces: given, tensors: named, kinds, parts, files, bytes: length, storages }) => {
  let end = 0, place = -1;
  const pieces = given.name.map((name, i) => {
    const at = given.at[i] === null ? null : end + given.at[i], bytes = given.size[i];
    if (at !== null) end = at + bytes;
    return { name, at, bytes, file: given.file[i], rows: [], left: bytes + given.lacks[i], storage: i < storages };
  });
  const rows = named.name.map((name, i) => {
    const [dtype, shape, device, bytes, notes] = kinds[named.kind[i]];
    place += named.piece[i];
    const held = (parts[i] ?? [place]).filter(number => number >= 0).map(number => pieces[number]);
    const start = pieces[place]?.at ?? null, offset = start === null ? -1 : start + named.inside[i];
    const file = held.length > 1 ? "several" : files[held[0]?.file ?? 0][0];
    // Tensors that share a storage do not count its bytes again: what is left of it is for the next.
    let most = bytes;
    const own = held.map(piece => {
      const taken = Math.min(most, piece.left);
      piece.left -= taken;
      most -= taken;
      return taken;
    });
    const row = { name, dtype, shape, device, bytes, notes, held, own, offset, file, sum: sum(own, taken => taken) };
    row.text = [name, dtype, shape, device, file, notes].join(" ").toLowerCase();
    for (const piece of held) piece.rows.push(row);
    return row;
  });
  for (const row of rows) {
    if (row.held.some(piece => piece.rows.length > 1)) row.notes = row.notes ? "shared, " + row.notes : "shared";
  }
  return { pieces, rows, files, length };
};

// -- tensors: what zoom and filter choose is drawn as a map and listed in a table

// Squarified: boxes in lines along the shorter side, each line as long as its boxes become squarer.
const divide = (nodes, x, y, width, height, put) => {
  let left = sum(nodes, node => node.bytes);
  for (let i = 0; i < nodes.length && left > 0 && width > 0.5 && height > 0.5;) {
    const side = Math.min(width, height), scale = width * height / left, first = nodes[i].bytes, flat = width < height;
    let inside = 0, worst = Infinity, next = i;
    for (; next < nodes.length; next++) {
      const thick = (inside + nodes[next].bytes) * scale / side, area = thick ** 2 / scale;
      const ratio = Math.max(first / area, area / nodes[next].bytes);
      if (ratio > worst) break;
      [inside, worst] = [inside + nodes[next].bytes, ratio];
    }
    const thick = inside * scale / side;
    for (let at = 0; i < next; i++) {
      const long = nodes[i].bytes * scale / thick;
      if (flat) put(nodes[i], x + at, y, long, thick); else put(nodes[i], x, y + at, thick, long);
      at += long;
    }
    if (flat) [y, height] = [y + thick, height - thick]; else [x, width] = [x + thick, width - thick];
    left -= inside;
  }
};

const nodeOf = (name, items, depth) => ({ name, items, depth, bytes: sum(items, item => item.bytes) });

// The branches of a node, large ones first. A branch without siblings is named with its parent.
const branches = node => node.inside ??= (() => {
  const groups = new Map();
  for (const item of node.items) {
    const step = item.steps[node.depth];
    if (step !== undefined && item.bytes) groups.get(step)?.push(item) ?? groups.set(step, [item]);
  }
  return [...groups].map(([name, items]) => {
    let depth = node.depth + 1;
    const alone = step => step !== undefined && items.every(({ steps }) => steps[depth] === step);
    while (alone(items[0].steps[depth])) name += items[0].steps[depth++];
    return nodeOf(name.replace(/^[./]/, ""), items, depth);
  }).sort((a, b) => b.bytes - a.bytes);
})();

const explore = (card, { rows, files }) => {
  const [canvas, input, crumbs, choices] = ["canvas", "input", ".crumbs", ".switch"].map(part => card.querySelector(part));
  const fields = ["name", "dtype", "shape", "bytes", "device", "offset", "file", "notes"].filter((field, i) =>
    i < 4 || rows.some(row => row[field] !== rows[0][field]));
  let trail, colours, boxes, shown;

  const divideBy = way => {
    const kind = way === "module" ? "dtype" : way;
    const items = rows.flatMap(row => {
      const steps = row.name.split(/(?=[./])/, 48), item = { row, steps, bytes: row.sum, kind: row[kind] };
      if (way === "module") return item;
      const pieces = way === "file" ? row.held.map((piece, i) => [files[piece.file][0], row.own[i]]) : [[row[kind], row.sum]];
      return pieces.map(([kind, bytes]) => ({ row, steps: [kind, ...steps], bytes, kind }));
    });
    const totals = new Map();
    for (const { kind, bytes } of items) totals.set(kind, (totals.get(kind) ?? 0) + bytes);
    const order = [...totals].sort((a, b) => b[1] - a[1]);
    colours = new Map(order.map(([kind], i) => [kind, Math.min(i, COLOURS)]));
    legend(card.querySelector(".legend"), order.slice(0, 24).map(([kind, bytes]) => ["c" + colours.get(kind), `${kind} ${size(bytes)}`]));
    for (const other of choices.children) other.ariaPressed = other.textContent === way;
    trail = [nodeOf("all", items, 0)];
    choose();
  };

  const draw = () => {
    const width = canvas.clientWidth, height = Math.round(Math.max(260, Math.min(440, width / 2)));
    const pen = penOf(canvas, height), filtered = input.value.trim();
    const [ink, frame, page] = ["ink", "frame", "card"].map(colour);
    const fills = Array.from({ length: COLOURS + 1 }, (_, i) => colour("c" + i));
    const write = (text, x, y, room, cut = true) => {
      const fits = Math.floor(text.length * room / pen.measureText(text).width);
      if (fits >= text.length) pen.fillText(text, x, y);
      else if (fits > 4 && cut) pen.fillText(text.slice(0, fits - 2) + "…", x, y);
    };
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    boxes = [{ node: trail.at(-1), x: 0, y: 0, w: width, h: height }];
    for (const { node, x, y, w, h } of boxes) {  // those inside are appended: upper levels come first
      const outer = node === trail.at(-1), inside = branches(node);
      const fits = w > 46 && h > 44 && w * h / inside.length > LEAST_BOX && boxes.length < MOST_BOXES;
      const opens = inside.length && (outer || fits);
      if (!outer) {
        const matched = filtered ? sum(node.items, item => item.row.match ? item.bytes : 0) / node.bytes : 1;
        pen.fillStyle = opens ? frame : page;
        pen.fillRect(x, y, w, h);
        if (opens) {
          pen.strokeStyle = page;
          pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        } else {
          const kinds = new Map();
          for (const { kind, bytes } of node.items) kinds.set(kind, (kinds.get(kind) ?? 0) + bytes);
          const [kind] = [...kinds].reduce((most, other) => other[1] > most[1] ? other : most);
          pen.globalAlpha = 0.12 + 0.88 * matched;
          pen.fillStyle = fills[colours.get(kind)];
          pen.fillRect(x + 0.5, y + 0.5, Math.max(w - 1, 0.5), Math.max(h - 1, 0.5));
        }
        pen.fillStyle = ink;
        if (opens) write(`${node.name}  ${size(node.bytes)}`, x + 6, y + 10, w - 10);
        else if (w > 30 && h > 15) {
          write(node.name, x + 5, h > 34 ? y + 12 : y + h / 2, w - 8);
          if (h > 34) write(size(node.bytes), x + 5, y + 27, w - 8, false);
        }
        pen.globalAlpha = 1;
      }
      if (!opens) continue;
      const most = inside.slice(0, MOST_CHILDREN), rest = inside.slice(MOST_CHILDREN).flatMap(({ items }) => items);
      if (rest.length) most.push({ ...nodeOf(`${tensors(rest.length)} more`, rest, node.depth), inside: [] });
      const gap = outer ? 0 : 3, head = outer ? 0 : 19;
      divide(most, x + gap, y + head, w - 2 * gap, h - head - gap, (node, x, y, w, h) => boxes.push({ node, x, y, w, h }));
    }
    canvas.role = "img";
    canvas.ariaLabel = `Map of ${tensors(shown.length)} by bytes; the table lists them`;
    crumbs.replaceChildren(...trail.map(({ name }, i) => button(name, () => {
      trail.length = i + 1;
      choose();
    })), ` ${tensors(shown.length)}, ${size(sum(shown, row => row.sum))}`);
  };

  const under = ({ offsetX, offsetY }) => boxes.findLast(({ x, y, w, h }, i) =>
    i && offsetX >= x && offsetX < x + w && offsetY >= y && offsetY < y + h)?.node;
  const zoom = node => {
    if (!node) return;
    if (node.items.length === 1) return detail(node.items[0].row);
    trail.push(node);
    choose();
  };
  canvas.onmousemove = event => {
    const node = under(event), row = node?.items.length === 1 && node.items[0].row;
    const share = `${size(node?.bytes ?? 0)}, ${(100 * node?.bytes / (trail[0].bytes || 1)).toFixed(2)} % of all`;
    hint(event, !node ? [] : row ? [row.name, `${row.dtype} ${row.shape} ${row.device}`, share] :
      [node.name, tensors(node.items.length), share]);
  };
  canvas.onclick = event => zoom(under(event));
  canvas.onmouseleave = event => hint(event, []);
  canvas.onkeydown = ({ key }) => {
    if (key === "Escape" && trail.length > 1 && trail.pop()) choose();
  };

  const { show, paint } = list(card.querySelector(".table"), fields.map((name, i) => ({
    name, kind: "f-" + name, isLarge: name === "bytes", wide: [4, 1, 1.2][i] ?? 1, value: row => row[name],
    cell: ({ [name]: value }) => name === "bytes" ? size(value) : name === "offset" ? value < 0 ? "" : count(value) :
      value || (name === "name" ? '""' : ""),
  })), "Tensors", row => detail(row));

  const detail = row => {
    const others = [...new Set(row.held.flatMap(piece => piece.rows))].filter(other => other !== row);
    const facts = { tensor: row.name, is: [row.dtype, row.shape, row.device, size(row.bytes), row.notes].filter(Boolean).join(", "),
      "bytes in": row.held.slice(0, 20).map(piece => `${files[piece.file][0]} ${piece.name}`.trim()).join(", "),
      "from byte": row.offset < 0 ? "" : count(row.offset), "shares with": others.slice(0, 20).map(other => other.name).join(", ") };
    const panel = card.querySelector(".detail");
    panel.replaceChildren(described(Object.entries(facts).filter(([, text]) => text)), button("Close", () => panel.replaceChildren()));
  };

  const choose = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.match = words.every(word => row.text.includes(word));
    shown = [...new Set(trail.at(-1).items.map(({ row }) => row))].filter(row => row.match);
    draw();
    show(shown);
  };

  input.oninput = choose;
  choices.append(...["module", "dtype", "device", "file"].filter((way, i) => !i || rows.some(row => row[way] !== rows[0][way]))
    .map(way => button(way, () => divideBy(way))));
  divideBy("module");
  return () => { draw(); paint(); };
};

// -- the layout: a strip for each file, in which nothing but padding is drawn smaller than two pixels

const KINDS = { tensors: ["c0", "tensors"], unused: ["c4", "storages of no tensor"], record: ["c2", "other records"],
  padding: ["frame", "headers and padding"], edge: ["c1", "start and end of the file"], hole: ["bad", "holes"] };

const segmentsOf = (pieces, length) => {
  const segments = [], placed = pieces.filter(piece => piece.at !== null && piece.bytes).sort((a, b) => a.at - b.at);
  const unplaced = pieces.some(piece => piece.at === null && piece.bytes);  // a hole may be one of these
  let end = 0;
  const add = (kind, at, bytes, piece) => { if (bytes > 0) segments.push({ kind, at, bytes, piece }); };
  for (const piece of placed) {
    add(!end ? "edge" : piece.at - end > 8192 && !unplaced ? "hole" : "padding", end, piece.at - end);
    add(piece.rows.length ? "tensors" : piece.storage ? "unused" : "record", piece.at, piece.bytes, piece);
    end = Math.max(end, piece.at + piece.bytes);
  }
  add("edge", end, length - end);
  return placed.length ? segments : [];
};

const lay = (card, { pieces, files, length }) => {
  const several = files.length > 1, parent = card.querySelector(".strips");
  const strips = files.map(([name, bytes], i) => {
    const segments = segmentsOf(pieces.filter(piece => piece.file === i), several ? bytes : length);
    return { name, segments, bytes: segments.at(-1) ? segments.at(-1).at + segments.at(-1).bytes : 0, canvas: element("canvas") };
  }).filter(strip => strip.bytes);
  card.hidden = !strips.length;
  const most = Math.max(...strips.map(strip => strip.bytes)), all = strips.flatMap(({ segments }) => segments);
  legend(card.querySelector(".legend"), Object.entries(KINDS).flatMap(([kind, [colour, text]]) => {
    const bytes = sum(all, segment => segment.kind === kind ? segment.bytes : 0);
    return bytes ? [[colour, `${text} ${size(bytes)}`]] : [];
  }));
  parent.classList.toggle("named", several);
  for (const { name, canvas, segments } of strips.slice(0, MOST_STRIPS)) {
    if (several) parent.append(element("span", "", name));
    parent.append(canvas);
    canvas.onmouseleave = event => hint(event, []);
    canvas.onmousemove = event => {
      const pixel = most / canvas.clientWidth, from = (event.offsetX - 1) * pixel, to = from + 2 * pixel;
      const here = segments.filter(({ at, bytes }) => at < to && at + bytes > from);
      here.sort((a, b) => (a.kind === "tensors" || a.kind === "padding") - (b.kind === "tensors" || b.kind === "padding"));
      hint(event, here.slice(0, 5).map(({ kind, at, bytes, piece }) =>
        `${piece?.name ?? KINDS[kind][1]}: ${size(bytes)} from byte ${count(at)}${piece?.rows.length ? `, ${piece.rows[0].name}` : ""}`));
    };
  }
  if (strips.length > MOST_STRIPS) parent.append(element("span", "", `and ${count(strips.length - MOST_STRIPS)} more files`));
  const draw = () => {
    const page = colour("card"), fills = Object.fromEntries(Object.entries(KINDS).map(([kind, [name]]) => [kind, colour(name)]));
    for (const { canvas, segments } of strips.slice(0, MOST_STRIPS)) {
      const height = several ? 16 : 34, pen = penOf(canvas, height), pixels = canvas.clientWidth / most;
      const isLarge = ({ kind }) => kind === "tensors" || kind === "padding";
      for (const { kind, at, bytes } of [...segments.filter(isLarge), ...segments.filter(segment => !isLarge(segment))]) {
        const wide = bytes * pixels, gap = wide > 3 ? 0.5 : 0;
        pen.fillStyle = fills[kind];
        pen.fillRect(at * pixels, 0, isLarge({ kind }) ? wide - gap : Math.max(wide, 2), height);
      }
    }
  };
  draw();
  return draw;
};

// -- the page

const sections = [...document.querySelectorAll("section.file")], views = new Map();
const current = () => sections.find(section => "#" + section.id === location.hash) ?? sections[0];
const drawCurrent = () => {
  for (const draw of views.get(current()) ?? []) draw();
};
const show = async () => {
  const section = current(), script = section.querySelector(":scope > script.data");
  for (const other of sections) other.hidden = other !== section;
  for (const link of document.querySelectorAll(".files a")) link.ariaCurrent = link.hash === "#" + section.id;
  if (views.has(section)) return drawCurrent();
  views.set(section, []);
  try {
    const data = read(await unpack(script));
    for (const [name, make] of [[".explorer", explore], [".layout", lay]]) {
      const card = section.querySelector(name);
      if (!card) continue;
      card.hidden = false;
      views.get(section).push(make(card, data));
    }
  } catch (error) {
    failed(section, error);
  }
};
addEventListener("hashchange", show);
draws.push(drawCurrent);
await show();
