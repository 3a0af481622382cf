"use strict";
// What the theme leaves out for readers who use a keyboard or a screen reader.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const box of document.querySelectorAll("article pre, article .table-wrapper, article .math")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  for (const summary of document.querySelectorAll("details.hide > summary")) summary.removeAttribute("aria-label");
  for (const head of document.querySelectorAll("th.head")) {
    if (!head.textContent.trim()) head.innerHTML = '<span class="visually-hidden">of what</span>';
  }
});
