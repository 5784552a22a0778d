// window.cumuloAttach: reads text files in the browser; each becomes a `file` event. Files are chosen with the paper
// clip, dropped anywhere on the page, or pasted. Used by ask_box.py, which says how large a file may be.
(() => {
  const LARGEST_BYTES = "LARGEST_BYTES";

  window.cumuloAttach = async (files) => {
    for (const file of files) {
      if (file.size > LARGEST_BYTES) {
        emitEvent("file", { name: file.name, problem: `is larger than ${LARGEST_BYTES / 1000} kB` });
        continue;
      }
      const text = await file.text().catch(() => "\u0000"); // a folder can be dropped, but not read
      const isText = !text.includes("\u0000") && !text.includes("\ufffd");
      emitEvent("file", isText ? { name: file.name, text } : { name: file.name, problem: "is not a text file" });
    }
  };

  const hasFiles = (transfer) => Boolean(transfer?.types.includes("Files"));
  const mark = (on) => document.body.classList.toggle("dropping", on);

  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event.dataTransfer)) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? mark(false));
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event.dataTransfer)) return;
    event.preventDefault();
    mark(false);
    window.cumuloAttach([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    window.cumuloAttach([...event.clipboardData.files]);
  });
})();
