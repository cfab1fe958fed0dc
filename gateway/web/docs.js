/** The page of the API: the operations of `/openapi.json`, with their schemas and a form to try them. */

import { showAccount } from "/web/account.js";
import { getJson } from "/web/client.js";
import { button, byId, copyButton, count, make } from "/web/dom.js";

const JSON_TYPE = "application/json";
const MOST_SHOWN = 20_000; // characters of a response
const UNSUPPORTED = "Not supported"; // how the description of a field that the node refuses begins
const REF = "#/components/schemas/";

let schemas = {};

/** A text of the document with its code between backticks. */
const prose = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", {}, part) : part));

/** A part that is closed at first, and whose content is made when it opens. */
function folded(summary, content, properties = {}) {
  const part = make("details", properties, make("summary", {}, ...summary));
  part.addEventListener("toggle", () => part.childElementCount === 1 && part.append(...content()));
  return part;
}

// --- Schemas -------------------------------------------------------------------------------------

/** The bounds of a value in words. */
function bounds(schema) {
  const { minimum, maximum, minLength, maxLength, minItems, maxItems, pattern } = schema;
  const range = (least, most, unit) => {
    if (least === undefined && most === undefined) return [];
    if (most === undefined) return [`${least} or more${unit}`];
    return [least === undefined ? `at most ${most}${unit}` : `${least} to ${most}${unit}`];
  };
  return [...range(minimum, maximum, ""), ...range(minLength, maxLength, " characters"), ...range(minItems, maxItems, " items"), ...(pattern ? [`matches ${pattern}`] : [])];
}

/** The type of a value, as strings and parts that show the schemas of objects. */
function typeOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.slice(REF.length);
    return [folded([name], () => schemaOf(schemas[name]), { className: "schema" })];
  }
  const options = schema.anyOf ?? schema.oneOf;
  if (options) {
    const known = options.filter((one) => one.type !== "null");
    return known.flatMap((one, index) => [...(index ? [" or "] : []), ...typeOf(one)]);
  }
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(", ")];
  if (schema.type === "array") return [`list${bounds(schema).map((one) => ` (${one})`)} of `, ...typeOf(schema.items ?? {})];
  if (schema.contentSchema) return typeOf(schema.contentSchema);
  return [[[schema.type ?? "any"].flat().join(" or "), ...bounds(schema)].join(", ")];
}

/** Rows of names, types and descriptions. */
function fields(rows) {
  const cells = rows.map(({ name, note, type, text }) =>
    make("div", {}, make("dt", {}, make("code", {}, name), make("span", { className: "note" }, note)), make("dd", {}, ...type, ...(text ? [make("p", {}, ...prose(text))] : []))),
  );
  return make("dl", { className: "fields" }, ...cells);
}

function schemaOf(schema) {
  const required = schema.required ?? [];
  const rows = Object.entries(schema.properties ?? {}).map(([name, one]) => {
    const given = one.default === undefined || one.default === null ? "" : `default ${JSON.stringify(one.default)}`;
    return { name, note: required.includes(name) ? "required" : given, type: typeOf(one), text: one.description };
  });
  const refused = rows.filter(({ text }) => text?.startsWith(UNSUPPORTED));
  const text = schema.description ? [make("p", { className: "note" }, ...prose(schema.description))] : [];
  if (rows.length) {
    const others = folded([`${count(refused.length, "field")} of other servers`], () => [fields(refused)]);
    return [...text, fields(rows.filter((row) => !refused.includes(row))), ...(refused.length ? [others] : [])];
  }
  return [...text, make("p", {}, ...typeOf({ ...schema, description: undefined }))];
}

// --- Operations ----------------------------------------------------------------------------------

function responses(found) {
  const rows = Object.entries(found).map(([status, { description, content = {} }]) => {
    const types = Object.entries(content).flatMap(([kind, { schema }]) => [`${kind}: `, ...typeOf(schema.properties?.data ?? schema), " "]);
    return { name: status, note: "", type: types, text: description };
  });
  return fields(rows);
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The command that sends a request. */
function curl(method, path, body) {
  const parts = ["curl", ...(method === "GET" ? [] : ["-X", method]), quoted(location.origin + path), "-H 'Authorization: Bearer KEY'"];
  if (body !== null) parts.push("-H 'Content-Type: application/json'", "-d", quoted(body));
  return parts.join(" ");
}

/** A form that sends a request with the session of the browser. */
function trial(method, path, media) {
  const examples = Object.entries(media?.examples ?? {});
  const title = `Body of ${method} ${path}`;
  const body = media && make("textarea", { rows: 8, spellcheck: false, "aria-label": title, value: JSON.stringify(examples[0]?.[1].value ?? {}, null, 2) });
  const choices = examples.map(([name, { value }]) => button(name, () => (body.value = JSON.stringify(value, null, 2))));
  const shown = make("pre", { className: "response", tabIndex: 0, role: "region", "aria-label": `Response of ${method} ${path}`, hidden: true });
  const send = button("Send", async () => {
    send.disabled = true;
    shown.textContent = await answer(method, path, body?.value ?? null).catch(() => "The server does not respond.");
    shown.hidden = false;
    send.disabled = false;
  }, { className: "primary" });
  const copy = copyButton(() => curl(method, path, body?.value ?? null), "Copy as curl");
  const bar = make("div", { className: "bar" }, send, copy, ...(examples.length > 1 ? ["Examples:", ...choices] : []));
  return [make("h3", {}, "Try it"), ...(body ? [body] : []), bar, shown];
}

async function answer(method, path, body) {
  const response = await fetch(path, { method, body, headers: body === null ? {} : { "content-type": JSON_TYPE } });
  const text = await response.text();
  const isJson = response.headers.get("content-type")?.startsWith(JSON_TYPE);
  const pretty = isJson ? JSON.stringify(JSON.parse(text), null, 2) : text;
  const cut = pretty.length > MOST_SHOWN ? `${pretty.slice(0, MOST_SHOWN)}\n…` : pretty;
  return `${response.status} ${response.statusText}\n\n${cut}`;
}

/** Whether the form can send an operation: it has no names in its path, and its response ends. */
function canTry(method, path, { requestBody, responses: found }) {
  const kinds = Object.keys(found["200"]?.content ?? {});
  const examples = requestBody?.content[JSON_TYPE]?.examples;
  if (path.includes("{") || kinds.includes("text/html") || method === "DELETE") return false;
  return requestBody ? Object.keys(examples ?? {}).length > 0 : kinds.some((kind) => kind !== "text/event-stream");
}

/** The only type of an operation's body and its schema, which is undefined without a body. */
function bodyOf({ requestBody }) {
  const [kind, media] = Object.entries(requestBody?.content ?? {})[0] ?? [];
  const schema = media?.schema;
  return { kind, media, schema: schema?.$ref ? schemas[schema.$ref.slice(REF.length)] : schema };
}

function operation(method, path, one) {
  const { kind, media, schema } = bodyOf(one);
  const given = one.parameters.map(({ name, in: place, required, schema, description }) => ({
    name,
    note: required ? `${place}, required` : place,
    type: typeOf(schema),
    text: description,
  }));
  return [
    ...(canTry(method, path, one) ? trial(method, path, media) : []),
    ...(schema ? [make("h3", {}, kind === JSON_TYPE ? "Body" : `Body (${kind})`), ...schemaOf(schema)] : []),
    make("h3", {}, "Parameters"),
    fields(given),
    make("h3", {}, "Responses"),
    responses(one.responses),
  ];
}

/** The words by which an operation is found: its path, its summary and the fields of its body. */
function wordsOf(method, path, one) {
  const names = Object.keys(bodyOf(one).schema?.properties ?? {});
  return [method, path, one.summary, ...names].join(" ").toLowerCase();
}

function show({ info, paths, components }) {
  schemas = components.schemas;
  byId("api-version").textContent = `version ${info.version}`;
  byId("api-text").textContent = info.description;
  const entries = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([name, one]) => [name.toUpperCase(), path, one]));
  const parts = entries.map(([method, path, one]) => {
    const summary = [make("span", { className: "method" }, method), " ", make("code", {}, path), " ", make("span", { className: "note" }, ...prose(one.summary))];
    return [wordsOf(method, path, one), folded(summary, () => operation(method, path, one), { className: "operation", id: one.operationId })];
  });
  byId("operations").replaceChildren(...parts.map(([, part]) => part));
  const find = () => {
    const wanted = byId("filter-api").value.trim().toLowerCase();
    for (const [words, part] of parts) part.hidden = !words.includes(wanted);
    byId("found-api").textContent = count(parts.filter(([, part]) => !part.hidden).length, "operation");
  };
  byId("filter-api").addEventListener("input", find);
  byId("find").addEventListener("submit", (event) => event.preventDefault());
  find();
  const linked = location.hash && document.getElementById(location.hash.slice(1));
  if (linked) linked.open = true;
}

if ((await showAccount()).role !== null) {
  await getJson("/openapi.json").then(show, (error) => {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
  });
}
