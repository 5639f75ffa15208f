// Makes wide tables fit: what is broken into lines depends on the reader's fonts and screen, which only the browser knows.
// A table that fits is left alone. One that does not, breaks its times and headings; one that still does not, is scrolled
// for itself, with a line above that says so, and with the keyboard, too.

function overflows(wrapper) {
  return wrapper.scrollWidth > wrapper.clientWidth;
}

function letHeadingsBreak(table) {
  for (const heading of table.querySelectorAll("th a, th:not(:has(a))")) {
    for (const text of [...heading.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
      const parts = text.data.split(/(?<=_)/);
      text.replaceWith(...parts.flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part])));
    }
  }
}

function fit(wrapper) {
  wrapper.classList.remove("kv-tight");
  wrapper.classList.toggle("kv-tight", overflows(wrapper));
  const scrolls = overflows(wrapper);
  wrapper.previousElementSibling.hidden = !scrolls;
  for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", "Table, scrolls sideways"]]) {
    if (scrolls) wrapper.setAttribute(name, value);
    else wrapper.removeAttribute(name);
  }
}

for (const wrapper of document.querySelectorAll(".table-wrapper")) {
  const sign = document.createElement("p");
  sign.className = "kv-sideways";
  sign.textContent = "Wider than the screen: scroll the table sideways \u2192";
  wrapper.before(sign);
  letHeadingsBreak(wrapper);
  fit(wrapper);
  // The width of the screen, and fonts that come late. A change of height, as of a sentence that is opened, is none.
  let width = wrapper.clientWidth;
  new ResizeObserver(() => {
    if (width !== wrapper.clientWidth) {
      width = wrapper.clientWidth;
      fit(wrapper);
    }
  }).observe(wrapper);
  document.fonts.ready.then(() => fit(wrapper));
}
