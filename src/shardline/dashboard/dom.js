// Elements from plain values, patched in place: what has not changed is not touched, so that focus, selection and the
// place of a reader stay. Text becomes text nodes only: there is no way from a string to markup.

const SVG = "http://www.w3.org/2000/svg";
const AS_PROPERTY = new Set(["value", "disabled", "open"]);
const known = new WeakMap(); // element -> { type, props }

/** An element to be. Props: attributes, `on…` functions, `style` (an object), `key`, `ref` (called with the element once
 *  it is there), `own` (its children are somebody else's). */
export function h(type, props, ...children) {
  return { type, props: props ?? {}, children: children.flat(Infinity).filter(isShown) };
}

function isShown(child) {
  return child !== null && child !== undefined && child !== false && child !== true && child !== "";
}

/** Make the children of `parent` what `children` say. */
export function patch(parent, children) {
  const shown = [children].flat(Infinity).filter(isShown);
  const keyed = new Map();
  for (const node of parent.childNodes) {
    const key = known.get(node)?.props.key;
    if (key !== undefined) keyed.set(key, node);
  }
  let at = parent.firstChild;
  for (const child of shown) {
    const node = placed(parent, child, at, keyed);
    at = node.nextSibling;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function placed(parent, child, at, keyed) {
  if (typeof child !== "object") return placedText(parent, String(child), at);
  const { key } = child.props;
  let node = key === undefined ? at : keyed.get(key);
  const was = node && known.get(node);
  if (!was || was.type !== child.type || was.props.key !== key) node = made(parent, child);
  if (node !== at) parent.insertBefore(node, at);
  update(node, child);
  return node;
}

function placedText(parent, text, at) {
  if (at?.nodeType === Node.TEXT_NODE) {
    // Appending keeps a selection in what is there already.
    if (at.data !== text) text.startsWith(at.data) ? at.appendData(text.slice(at.data.length)) : (at.data = text);
    return at;
  }
  return parent.insertBefore(document.createTextNode(text), at);
}

function made(parent, { type, props }) {
  const inSvg = type === "svg" || (parent.namespaceURI === SVG && parent.localName !== "foreignObject");
  const node = inSvg ? document.createElementNS(SVG, type) : document.createElement(type);
  known.set(node, { type, props: { key: props.key } });
  if (props.ref) queueMicrotask(() => props.ref(node));
  return node;
}

function update(node, { type, props, children }) {
  const before = known.get(node).props;
  for (const name of Object.keys(before)) if (!(name in props)) setProp(node, name, null, before[name]);
  for (const [name, value] of Object.entries(props)) {
    // What a person has typed is in the element only.
    if (value !== before[name] || AS_PROPERTY.has(name)) setProp(node, name, value, before[name]);
  }
  known.set(node, { type, props });
  if (!props.own) patch(node, children);
  // The choice of a list is only good once its options are there.
  if (type === "select" && props.value !== undefined && node.value !== props.value) node.value = props.value;
  props.each?.(node);
}

function setProp(node, name, value, before) {
  if (name === "key" || name === "ref" || name === "own" || name === "each") return;
  if (name === "style") {
    for (const key of Object.keys(before ?? {})) if (!(key in (value ?? {}))) node.style.removeProperty(key);
    for (const [key, item] of Object.entries(value ?? {})) {
      if (String(item) !== String(before?.[key])) node.style.setProperty(key, String(item));
    }
  } else if (name.startsWith("on")) {
    node[name] = value;
  } else if (AS_PROPERTY.has(name)) {
    if (node[name] !== value) node[name] = value ?? "";
  } else if (value === null || value === undefined || value === false) {
    node.removeAttribute(name);
  } else {
    node.setAttribute(name, value === true ? "" : String(value));
  }
}
