// window.cumuloAttach: reads text files in the browser; each becomes a `file` event. A PDF becomes `pdf` events, a part
// each, because a socket takes a megabyte; the server extracts its text. Files are chosen with the paper
// clip, dropped anywhere on the page, or pasted. Used by ask_box.py, which says how large a file may be.
(() => {
  const LARGEST_BYTES = "LARGEST_BYTES";
  const LARGEST_PDF_BYTES = "LARGEST_PDF_BYTES";
  const PART_BYTES = 480_000;

  async function sendPdf(file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const parts = Math.ceil(bytes.length / PART_BYTES);
    for (let part = 0; part < parts; part += 1) {
      let text = "";
      for (const byte of bytes.subarray(part * PART_BYTES, (part + 1) * PART_BYTES)) text += String.fromCharCode(byte);
      emitEvent("pdf", { name: file.name, part, parts, data: btoa(text) });
    }
  }

  window.cumuloAttach = async (files) => {
    for (const file of files) {
      const isPdf = /\.pdf$/i.test(file.name);
      const most = isPdf ? LARGEST_PDF_BYTES : LARGEST_BYTES;
      if (file.size > most) {
        emitEvent("file", { name: file.name, problem: `is larger than ${most / 1000} kB` });
        continue;
      }
      if (isPdf) {
        await sendPdf(file);
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
