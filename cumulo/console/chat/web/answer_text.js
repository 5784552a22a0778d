// <answer_text>: a growing text, drawn as Markdown. Only its last block is drawn again when something is added.
// `tokens`, if there are any, are [text, probability, explanation] and underline what was unlikely.
import { blocks, replaceTexts } from "cumulo_markdown";

export default {
  template: '<div class="answer-text" @mouseover="show" @mouseleave="hide" @click="copy"></div>',
  props: { text: String, tokens: Array, waiting: Boolean },
  emits: ["behind"],
  mounted() {
    this.redraw();
  },
  unmounted() {
    this.hide();
  },
  watch: {
    text() { this.redraw(); },
    tokens() { this.redraw(); },
    waiting() { this.$el.classList.toggle("waiting", this.waiting); },
  }, // prettier-ignore
  methods: {
    redraw() {
      this.source = "";
      this.points = 0;
      this.marks = [];
      this.ends = [];
      this.drawn = [];
      this.$el.replaceChildren();
      this.$el.classList.toggle("waiting", this.waiting);
      this.add(this.text ?? "", this.tokens ?? []);
    },
    /** What is new since `offset` code points; if something was missed, the server sends everything again. */
    append(offset, piece, tokenOffset, tokens) {
      if (offset !== this.points || tokenOffset !== this.marks.length) this.$emit("behind");
      else this.add(piece, tokens);
    },
    add(piece, tokens) {
      this.source += piece;
      this.points += [...piece].length;
      for (const token of tokens) {
        this.marks.push(token);
        this.ends.push((this.ends.at(-1) ?? 0) + token[0].length);
      }
      const last = this.drawn.pop();
      last?.node.remove();
      for (const block of blocks(this.source, last?.at ?? 0)) {
        if (this.marks.length) replaceTexts(block.node, this.source, block.at, this.marked);
        this.$el.append(block.node);
        this.drawn.push(block);
      }
    },
    marked(text, places) {
      const parent = document.createDocumentFragment();
      let from = 0;
      while (from < text.length) {
        const index = tokenAt(this.ends, places[from]);
        let to = from + 1;
        while (to < text.length && tokenAt(this.ends, places[to]) === index) to += 1;
        const token = this.marks[index];
        if (token === undefined) {
          parent.append(text.slice(from, to));
        } else {
          const node = document.createElement("span");
          node.className = "token";
          node.dataset.token = index;
          node.style.setProperty("--surprise", `${Math.round(100 * (1 - token[1]))}%`);
          node.append(text.slice(from, to));
          parent.append(node);
        }
        from = to;
      }
      return parent;
    },
    copy(event) {
      const button = event.target.closest(".copy-code");
      if (!button) return;
      window.cumuloCopy(button.closest(".code-block").querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1200);
    },
    show(event) {
      const index = event.target.dataset?.token;
      if (index === undefined) return this.hide();
      this.bubble ??= document.body.appendChild(document.createElement("div"));
      this.bubble.className = "token-odds";
      this.bubble.textContent = this.marks[index][2];
      const place = event.target.getBoundingClientRect();
      const left = Math.max(8, Math.min(place.left, window.innerWidth - this.bubble.offsetWidth - 8));
      const below = place.bottom + this.bubble.offsetHeight + 8 < window.innerHeight;
      this.bubble.style.left = `${left}px`;
      this.bubble.style.top = `${below ? place.bottom + 4 : place.top - this.bubble.offsetHeight - 4}px`;
    },
    hide() {
      this.bubble?.remove();
      this.bubble = null;
    },
  },
};

/** The token that a place of the source belongs to. */
function tokenAt(ends, place) {
  let low = 0;
  let high = ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] <= place) low = middle + 1;
    else high = middle;
  }
  return low;
}
