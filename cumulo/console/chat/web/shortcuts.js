// Keys of the chat page. Single letters count only where nothing is being typed; each becomes a `shortcut` event.
document.addEventListener("keydown", (event) => {
  if (event.isComposing || event.defaultPrevented || document.querySelector(".q-dialog, .q-menu")) return;
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  const held = event.ctrlKey || event.metaKey;
  let name = null;
  if (held && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") name = "search";
  else if (held && event.key === "/") name = "help";
  else if (event.key === "Escape") name = "stop";
  else if (!typing && !held && !event.altKey) {
    name = { n: "new", s: "search", "/": "focus", i: "focus", r: "regenerate", "?": "help" }[event.key] ?? null;
  }
  if (name === null) return;
  if (name === "search") document.querySelector("aside.history")?.classList.add("open");
  if (name === "focus" || name === "search") {
    event.preventDefault();
    document.querySelector(name === "focus" ? ".ask textarea" : "aside.history input:not([type=file])")?.focus();
  } else {
    if (name === "stop") event.target.blur?.();
    if (name !== "stop") event.preventDefault();
    emitEvent("shortcut", name);
  }
});
