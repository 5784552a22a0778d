// window.cumuloChats: what the browser keeps of the chat page: conversations, own presets, settings. The server keeps
// none of it. Called by browser_store.py. Bounded: the conversations used least recently give way.
(() => {
  const MOST_CHATS = 100;
  const MOST_CHARACTERS = 4_000_000; // browsers give a site about 5 million
  const LONGEST_TITLE = 80;
  const PART_CHARACTERS = 150_000; // of a conversation on its way to the server: a socket takes a megabyte
  const LARGEST_IMPORT = 10_000_000; // bytes
  let scope = "";
  let offered = ""; // the text of a conversation that is imported
  const key = (kind, id = "") => `cumulo:${scope}:${kind}:${id}`;

  function read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(name)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  function chats() {
    const beginning = key("chat");
    return Object.keys(localStorage)
      .filter((name) => name.startsWith(beginning))
      .map((name) => read(name, null))
      .filter((chat) => chat && Array.isArray(chat.entries))
      .sort((one, other) => other.updated_s - one.updated_s);
  }

  const matches = (chat, words) =>
    [chat.name, ...chat.entries.flatMap((e) => [e.content, ...(e.files ?? []).flatMap((f) => [f.name, f.text])])]
      .some((text) => text.toLowerCase().includes(words));

  function list(search = "") {
    const words = search.trim().toLowerCase();
    return chats()
      .filter((chat) => !words || matches(chat, words))
      .map(({ id, name, updated_s }) => ({ id, name, updated_s }));
  }

  function makeRoom() {
    let used = 0;
    for (const [position, chat] of chats().entries()) {
      used += localStorage.getItem(key("chat", chat.id)).length;
      if (position && (position >= MOST_CHATS || used > MOST_CHARACTERS)) localStorage.removeItem(key("chat", chat.id));
    }
  }

  /** False if the browser has no room or keeps nothing for this site. */
  function save(chat) {
    for (let attempt = 0; attempt < MOST_CHATS; attempt += 1) {
      try {
        localStorage.setItem(key("chat", chat.id), JSON.stringify(chat));
        makeRoom();
        return true;
      } catch {
        const oldest = chats().at(-1);
        if (!oldest || oldest.id === chat.id) return false;
        localStorage.removeItem(key("chat", oldest.id));
      }
    }
    return false;
  }

  const load = (id) => read(key("chat", id), null);
  const part = (id, number) =>
    (id ? (localStorage.getItem(key("chat", id)) ?? "") : offered)
      .slice(number * PART_CHARACTERS, (number + 1) * PART_CHARACTERS);
  const remove = (id) => localStorage.removeItem(key("chat", id));

  function rename(id, title) {
    const chat = load(id);
    if (chat) save({ ...chat, title: title.slice(0, LONGEST_TITLE), name: title.slice(0, LONGEST_TITLE) });
  }

  /** What has come so far of an answer: it stays if the server that makes it ends. */
  function grow(id, pending, half) {
    const chat = load(id);
    const entry = chat?.entries.find((e) => e.pending === pending);
    if (!entry) return;
    Object.assign(entry, half);
    save(chat);
  }

  // What is typed and not sent stays in its tab.
  window.onpagehide = () => {
    sessionStorage.setItem(key("draft"), document.querySelector(".ask textarea")?.value ?? "");
  };

  function stay(id) {
    sessionStorage.setItem(key("current"), id); // of this tab
  }

  function begin(visitor) {
    scope = visitor;
    return {
      current: sessionStorage.getItem(key("current")),
      chats: list(),
      draft: sessionStorage.getItem(key("draft")),
      presets: read(key("presets"), {}),
      settings: read(key("settings"), {}),
    };
  }

  function keep(kind, value) {
    try {
      localStorage.setItem(key(kind), JSON.stringify(value));
    } catch {
      // settings are a convenience
    }
  }

  // -- export --------------------------------------------------------------------------------------------------
  function fileName(chat, ending) {
    const words = chat.name.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50).replace(/^-+|-+$/g, "");
    return `${words || "chat"}.${ending}`;
  }

  /** The branch that is shown, from its first message on: an entry follows its `parent`, or the one before it. */
  function branch({ entries, leaf = entries.length - 1 }) {
    const shown = [];
    for (let place = leaf; place >= 0; place = entries[place].parent ?? place - 1) shown.unshift(entries[place]);
    return shown;
  }

  function asMarkdown(chat) {
    const parts = [`# ${chat.name}`];
    for (const entry of branch(chat)) {
      parts.push(`## ${{ user: "User", assistant: "Assistant", tool: "Tool result" }[entry.role]}`);
      for (const file of entry.files ?? []) parts.push(`Attached file: ${file.name}`);
      if (entry.content) parts.push(entry.content);
      for (const call of entry.tool_calls ?? []) {
        parts.push("Calls `" + call.function.name + "` with\n```json\n" + call.function.arguments + "\n```");
      }
    }
    return parts.join("\n\n") + "\n";
  }

  function download(id, form) {
    const chat = load(id);
    if (!chat) return;
    const text = form === "json" ? JSON.stringify(chat, null, 2) + "\n" : asMarkdown(chat);
    const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    const link = document.createElement("a");
    link.href = address;
    link.download = fileName(chat, form === "json" ? "json" : "md");
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  const copy = (id) => window.cumuloCopy(asMarkdown(load(id)));

  /** A conversation that was exported as JSON becomes an `import` event; the server checks what it contains. */
  async function offer(file) {
    offered = file.size < LARGEST_IMPORT ? await file.text() : "";
    emitEvent("import");
  }

  window.cumuloChats = { begin, list, load, part, save, grow, remove, rename, stay, keep, download, copy, offer };

  // The clipboard's own interface exists only over https and on this machine.
  window.cumuloCopy = (text) => {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const box = document.body.appendChild(document.createElement("textarea"));
    box.value = text;
    box.select();
    document.execCommand("copy");
    box.remove();
  };
})();
