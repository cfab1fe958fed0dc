/** The colours of code: strings, comments, numbers and keywords, without a parser of the language. */

import { make } from "/web/dom.js";

const words = (text) => new Set(text.split(" "));

const C_LIKE =
  "break case catch class const continue default delete do else enum export extends extern false final finally for " +
  "function goto if implements import in instanceof interface let namespace new null package private protected public " +
  "return static struct super switch this throw throws true try typedef typeof union using var virtual void volatile " +
  "while with yield async await of from as type abstract auto bool boolean byte char double float int long short " +
  "signed sizeof string unsigned template typename override undefined nullptr";

const LANGUAGES = {
  python: {
    comments: ["#.*"],
    strings: ['"""[^]*?(?:"""|(?![^]))', "'''[^]*?(?:'''|(?![^]))"],
    keywords: words(
      "and as assert async await break case class continue def del elif else except False finally for from global if " +
        "import in is lambda match None nonlocal not or pass raise return True try while with yield self",
    ),
  },
  c: { comments: ["//.*", "/\\*[^]*?(?:\\*/|(?![^]))"], strings: ["`(?:\\\\[^]|[^`\\\\])*`?"], keywords: words(C_LIKE) },
  go: {
    comments: ["//.*", "/\\*[^]*?(?:\\*/|(?![^]))"],
    strings: ["`[^`]*`?"],
    keywords: words(
      "break case chan const continue default defer else fallthrough false for func go goto if import interface map nil " +
        "package range return select struct switch true type var string int bool error byte rune float64",
    ),
  },
  rust: {
    comments: ["//.*", "/\\*[^]*?(?:\\*/|(?![^]))"],
    strings: [],
    // A lifetime such as 'a begins like a character.
    characters: "'(?:\\\\[^']+|[^'\\\\])'",
    keywords: words(
      "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut " +
        "pub ref return self Self static struct super trait true type unsafe use where while bool char str String Vec " +
        "Option Result Some None Ok Err i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 usize isize",
    ),
  },
  shell: {
    comments: ["(?<=^|\\s)#.*"],
    strings: [],
    keywords: words(
      "if then else elif fi for while until do done case esac in function return exit export local readonly set unset " +
        "echo cd source sudo",
    ),
  },
  sql: {
    comments: ["--.*", "/\\*[^]*?(?:\\*/|(?![^]))"],
    strings: [],
    ignoresCase: true,
    keywords: words(
      "select from where and or not in is null as join left right inner outer full on group by order having limit offset " +
        "insert into values update set delete create table index view drop alter add primary key foreign references " +
        "unique default distinct union all case when then else end exists between like with count sum avg min max",
    ),
  },
  data: { comments: ["(?<=^|\\s)#.*"], strings: [], keywords: words("true false null yes no on off") },
  markup: { comments: ["<!--[^]*?(?:-->|(?![^]))"], strings: [], keywords: words(""), tags: true },
};

const NAMES = {
  py: "python", python3: "python", rb: "python", ruby: "python",
  javascript: "c", js: "c", jsx: "c", typescript: "c", ts: "c", tsx: "c", java: "c", "c++": "c", cpp: "c", cc: "c", h: "c",
  hpp: "c", cs: "c", csharp: "c", "c#": "c", kotlin: "c", kt: "c", swift: "c", php: "c", scala: "c", dart: "c", css: "c",
  scss: "c", json: "data", jsonc: "c", yaml: "data", yml: "data", toml: "data", ini: "data",
  golang: "go", rs: "rust", bash: "shell", sh: "shell", zsh: "shell", console: "shell", dockerfile: "shell",
  makefile: "shell", postgresql: "sql", mysql: "sql", sqlite: "sql", html: "markup", xml: "markup", svg: "markup",
};

const patterns = new Map(); // name of a language -> its expression

/** Return the nodes of code in a language, with a span for each part that has a colour. */
export function highlight(code, name) {
  const key = NAMES[name.toLowerCase()] ?? name.toLowerCase();
  if (!Object.hasOwn(LANGUAGES, key)) return [code];
  const { keywords, ignoresCase } = LANGUAGES[key];
  const nodes = [];
  let at = 0;
  const add = (text, kind, index) => {
    nodes.push(code.slice(at, index), make("span", { className: `code-${kind}` }, text));
    at = index + text.length;
  };
  for (const { 0: text, index, groups } of code.matchAll(pattern(key))) {
    const kind = Object.keys(groups).find((one) => groups[one] !== undefined);
    if (kind !== "word") add(text, kind, index);
    else if (keywords.has(ignoresCase ? text.toLowerCase() : text)) add(text, "keyword", index);
  }
  return [...nodes, code.slice(at)].filter((node) => node !== "");
}

/** The parts of a language. The first form that fits at a place wins, so the order matters. */
function pattern(key) {
  if (!patterns.has(key)) {
    const { comments, strings, characters = "'(?:\\\\[^]|[^'\\\\\\n])*'?", tags } = LANGUAGES[key];
    const quoted = [...strings, '"(?:\\\\[^]|[^"\\\\\\n])*"?', characters];
    const forms = [
      `(?<comment>${comments.join("|")})`,
      `(?<string>${(tags ? quoted.map((one) => `(?<==\\s{0,9})${one}`) : quoted).join("|")})`,
      ...(tags ? ["(?<keyword></?[A-Za-z][\\w:-]*|/?>)"] : []),
      "(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)",
      "(?<number>0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)",
    ];
    patterns.set(key, new RegExp(forms.join("|"), "gmu"));
  }
  return patterns.get(key);
}
