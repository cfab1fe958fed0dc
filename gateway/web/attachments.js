/** Files that a user pastes or drops: text is inserted as text, and everything else is refused. */

const MOST_BYTES = 200_000;
const MEDIA = { image: "an image", audio: "an audio file", video: "a video" };

/**
 * Read files. Returns the `texts` of text files, each as a code block below its name, and the
 * `refusals`, a sentence for each other file.
 */
export async function read(files) {
  const texts = [];
  const refusals = [];
  for (const file of files) {
    const refusal = refusalOf(file);
    const content = refusal ? null : await decoded(file);
    if (content === null) refusals.push(refusal ?? `${file.name} is not a text file. Only text can be sent.`);
    else texts.push(block(file.name, content));
  }
  return { texts, refusals };
}

function refusalOf({ name, type, size }) {
  const media = MEDIA[type.split("/")[0]];
  if (media) return `${name || "The file"} is ${media}. Only text can be sent.`;
  if (size > MOST_BYTES) return `${name} is larger than ${MOST_BYTES / 1000} kB, the most that a message takes.`;
  return null;
}

/** Return the text of a file, or null if it is not UTF-8 text. */
async function decoded(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null; // not UTF-8, or a folder
  }
}

/** A code block whose fence is longer than any in the text. */
function block(name, content) {
  const longest = Math.max(2, ...[...content.matchAll(/`+/g)].map(([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([A-Za-z0-9]+)$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${content.replace(/\n$/, "")}\n${fence}\n`;
}
