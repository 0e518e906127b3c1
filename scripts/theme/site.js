"use strict";
(() => {
  const root = document.documentElement;
  const base = document.currentScript.dataset.root.replace(/\/$/, "");

  // The reader's choice of light or dark; until there is one, that of the system.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = {
    get theme() { try { return localStorage.getItem("theme"); } catch { return null; } },
    set theme(value) { try { localStorage.setItem("theme", value); } catch { /* not allowed: until the next page */ } },
  };
  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    root.dataset.shown = root.dataset.theme ?? (system.matches ? "dark" : "light");
  };
  show(stored.theme);
  system.addEventListener("change", () => show());

  // Every word must be in a section; a title, above all one that is or begins with what was typed, counts most.
  let sections = [];
  const search = (text) => {
    const query = text.toLowerCase().trim();
    const words = query.split(/\s+/).filter(Boolean);
    const found = [];
    for (const section of words.length ? sections : []) {
      const { name, body } = section;
      if (!words.every((word) => name.includes(word) || body.includes(word))) continue;
      let score = section.location.includes("#") ? 0 : 1;
      if (name === query || name.startsWith(`${query}:`)) score += 100;
      else if (name.startsWith(query)) score += 40;
      else if (name.includes(query)) score += 20;
      for (const word of words) score += name.includes(word) ? 8 : 0;
      if (body.includes(query)) score += 4;
      found.push([score, section]);
    }
    return found.sort((a, b) => b[0] - a[0]).slice(0, 20).map(([, section]) => section);
  };

  const element = (tag, text = "") => Object.assign(document.createElement(tag), { textContent: text });
  const excerpt = ({ text, body }, words) => {
    const word = words.find((word) => body.includes(word)) ?? "";
    const at = body.indexOf(word);
    const start = at < 60 ? 0 : text.indexOf(" ", at - 50);
    const small = element("small", (start ? "…" : "") + text.slice(start, at));
    small.append(element("mark", text.slice(at, at + word.length)), text.slice(at + word.length, start + 160));
    return small;
  };

  // The index is a script, not JSON: a page that is opened from the disk may read nothing else.
  let loading;
  const load = () => loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = `${base}/search/index.js`;
    script.onload = () => {
      sections = window.searchIndex.map(([location, title, text, page]) => (
        { location, title, text, page, name: title.toLowerCase(), body: text.toLowerCase() }
      ));
      resolve();
    };
    document.head.append(script);
  });

  addEventListener("DOMContentLoaded", () => {
    document.querySelector(".theme").onclick = () => {
      stored.theme = root.dataset.shown === "dark" ? "light" : "dark";
      show(stored.theme ?? (root.dataset.shown === "dark" ? "light" : "dark"));
    };

    const menu = document.querySelector("nav");
    document.querySelector(".menu").onclick = (event) => {
      event.target.ariaExpanded = menu.classList.toggle("open");
    };
    const current = menu.querySelector("[aria-current]");
    if (current) menu.scrollTop = current.offsetTop - menu.clientHeight / 2;

    const input = document.querySelector(".search input");
    const results = document.querySelector(".results");
    const links = () => [...results.querySelectorAll("a")];
    const draw = async () => {
      await load();
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      results.replaceChildren(...search(input.value).map((section, number) => {
        const link = element("a");
        link.href = `${base}/${section.location}`;
        link.className = number ? "" : "chosen";
        link.append(element("b", section.title));
        if (section.page !== section.title) link.append(element("i", ` · ${section.page}`));
        link.append(excerpt(section, words));
        return link;
      }));
      if (!results.firstChild) results.append(element("p", "Nothing has all these words."));
      results.hidden = !words.length;
    };
    input.onfocus = load;
    input.oninput = draw;
    input.onkeydown = (event) => {
      const all = links();
      const at = all.findIndex((link) => link.classList.contains("chosen"));
      const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
      if (all[to]) {
        all[at].classList.remove("chosen");
        all[to].classList.add("chosen");
        all[to].scrollIntoView({ block: "nearest" });
        event.preventDefault();
      } else if (event.key === "Enter" && all[at]) {
        all[at].click();
        results.hidden = true;
      } else if (event.key === "Escape") {
        results.hidden = true;
      }
    };
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, textarea")) return;
      event.preventDefault();
      input.focus();
    });
    addEventListener("click", (event) => {
      if (!event.target.closest(".search")) results.hidden = true;
      else if (event.target.closest("a")) results.hidden = true;
    });
  });
})();
