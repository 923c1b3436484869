/* What is shown, compared with what is to be shown.
   Owns: which elements stay from one drawing to the next.
   Does not know: Markdown.
   Invariants: an element is made anew only if its own part changed: a table with one more row gets one more element.

   A part is a leaf {kind, key, make, grow} or a container {kind, make, inner}. `make()` gives a leaf's nodes, or a
   container's {nodes, hole}: what is inserted, and the element that takes the nodes of `inner`. Parts of the same kind
   and key look the same. `grow(nodes, oldKey)` may change nodes in place, if the old part allows it, and says whether. */

/** Lets `hole` show `parts` from the child part `from` on. `kept`: what it shows, as this function left it. */
export function show(hole, kept, parts, from = 0) {
  parts.forEach((part, i) => {
    const old = kept[from + i];
    if (old?.kind === part.kind) {
      if (part.inner) { show(old.hole, old.inner, part.inner); return; }
      if (old.key === part.key) return;
      if (part.grow?.(old.nodes, old.key)) { old.key = part.key; return; }
    }
    const made = begun(part);
    if (old) { old.nodes[0].before(...made.nodes); leave(old); }
    else hole.append(...made.nodes);
    kept[from + i] = made;
  });
  kept.splice(from + parts.length).forEach(leave);
}

function begun({ kind, key, make, inner }) {
  if (!inner) {
    const nodes = make();
    return { kind, key, nodes: nodes.length ? nodes : [document.createTextNode("")] }; // it marks the place
  }
  const { nodes, hole } = make();
  const kept = [];
  show(hole, kept, inner);
  return { kind, nodes, hole, inner: kept };
}

function leave({ nodes }) { for (const node of nodes) node.remove(); }
