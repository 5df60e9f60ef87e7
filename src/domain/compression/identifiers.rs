//! Identifiers in a text: paths, addresses, ids, hashes and long numbers. Words of scripts without spaces end
//! one, so that a path is found in the middle of a Chinese or Arabic sentence.

use std::collections::HashSet;

use memchr::memmem;

/// Ends of file names that are no words.
const EXTENSIONS: [&str; 52] = [
    "rs", "py", "ts", "tsx", "jsx", "mjs", "json", "toml", "yaml", "yml", "md", "txt", "pdf",
    "doc", "docx", "xls", "xlsx", "ppt", "pptx", "csv", "tsv", "png", "jpg", "jpeg", "gif", "svg",
    "html", "htm", "css", "scss", "sh", "bat", "sql", "go", "java", "cpp", "hpp", "rb", "php",
    "log", "conf", "cfg", "ini", "env", "xml", "zip", "gz", "tar", "lock", "exe", "sqlite",
    "ipynb",
];
const DOMAINS: [&str; 5] = ["com", "org", "net", "dev", "example"];
const LONG_NUMBER: usize = 5;

/// A text in which identifiers are looked for.
#[derive(Debug, Default)]
pub(super) struct Haystack {
    text: String,
    /// Numbers that are written in groups, as digits.
    numbers: HashSet<String>,
}

impl Haystack {
    pub fn add(&mut self, text: &str) {
        let normal = normalise(text);
        for token in tokens(&normal) {
            self.numbers.extend(grouped_number(token));
        }
        self.text.push_str(&normal);
        self.text.push('\n');
    }

    /// Whether the identifier stands there, not as a part of another word.
    fn has_token(&self, token: &str) -> bool {
        let bytes = token.as_bytes();
        let is_hash = token.len() >= 7 && bytes.iter().all(u8::is_ascii_hexdigit);
        let starts_word = token.starts_with(is_of_word);
        let ends_word = token.ends_with(is_of_word);
        memmem::find_iter(self.text.as_bytes(), bytes).any(|start| {
            let before = self.text[..start].chars().next_back();
            let after = self.text[start + bytes.len()..].chars().next();
            // A hash is often given by its beginning.
            let is_whole = is_hash && !bytes.iter().all(u8::is_ascii_digit)
                || !(ends_word && after.is_some_and(is_of_word));
            !(starts_word && before.is_some_and(is_of_word)) && is_whole
        })
    }

    fn has(&self, identifier: &str) -> bool {
        if self.has_token(identifier) {
            return true;
        }
        match grouped_number(identifier) {
            Some(number) => self.numbers.contains(&number) || self.has_token(&number),
            None => self.numbers.contains(identifier),
        }
    }

    /// Whether it has an identifier of a summary, or what is left of it without the words around it.
    pub fn contains(&self, identifier: &str) -> bool {
        if self.has(identifier) {
            return true;
        }
        let core = without_words(identifier);
        core != identifier && (!is_identifier(core) || self.has(core))
    }
}

/// The identifiers of a text in normal form.
pub(super) fn identifiers(normal: &str) -> impl Iterator<Item = &str> {
    tokens(normal).filter(|token| is_identifier(token))
}

/// Lower case, and the digits of all scripts as those of ASCII.
pub(super) fn normalise(text: &str) -> String {
    text.chars()
        .flat_map(char::to_lowercase)
        .map(ascii_digit)
        .collect()
}

fn ascii_digit(c: char) -> char {
    /// Zeros of scripts; their other digits follow them.
    const ZEROS: [u32; 12] = [
        0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xBE6, 0xE50, 0xED0, 0x17E0, 0xFF10,
    ];
    let code = u32::from(c);
    let digit = ZEROS
        .iter()
        .map(|zero| code.wrapping_sub(*zero))
        .find(|digit| *digit < 10);
    digit
        .and_then(|digit| char::from_digit(digit, 10))
        .unwrap_or(c)
}

/// A letter or digit of a script that divides words by spaces. Arabic joins short words to the next one.
fn is_of_word(c: char) -> bool {
    let is_joined = matches!(u32::from(c),
        0x590..=0x8FF | 0xE00..=0xEFF | 0xF00..=0x109F | 0x1100..=0x11FF | 0x1780..=0x17FF
        | 0x2E80..=0xA4CF | 0xAC00..=0xD7FF | 0xF900..=0xFAFF | 0xFB1D..=0xFDFF | 0xFE70..=0xFEFF
        | 0xFF66..=0xFFDC | 0x20000..=0x3FFFF);
    c.is_alphanumeric() && !is_joined
}

/// Runs of letters, digits and what joins them in identifiers.
fn tokens(normal: &str) -> impl Iterator<Item = &str> {
    let mut rest = normal;
    std::iter::from_fn(move || {
        let start = rest.find(is_of_token)?;
        rest = &rest[start..];
        let mut end = rest.len();
        let mut before = ' ';
        for (index, c) in rest.char_indices() {
            let joins_digits = matches!(c, ',' | '\'' | '’' | '\u{a0}' | '\u{202f}')
                && before.is_ascii_digit()
                && rest[index + c.len_utf8()..].starts_with(|c: char| c.is_ascii_digit());
            if !is_of_token(c) && !joins_digits {
                end = index;
                break;
            }
            before = c;
        }
        let (token, after) = rest.split_at(end);
        rest = after;
        Some(trim(token))
    })
}

fn is_of_token(c: char) -> bool {
    is_of_word(c) || "/\\.:@_-+%#~?&=".contains(c)
}

/// Without punctuation around it, but with the beginning of a path.
fn trim(token: &str) -> &str {
    let token = token.trim_end_matches(|c| !is_of_word(c));
    let is_path = ["/", "./", "../", "~/"]
        .iter()
        .any(|start| token.starts_with(start));
    if is_path {
        token
    } else {
        token.trim_start_matches(|c| !is_of_word(c))
    }
}

/// `12,345` as `12345`.
fn grouped_number(token: &str) -> Option<String> {
    let separator = token.find(|c: char| !c.is_ascii_digit())?;
    let separator = token[separator..].chars().next()?;
    let mut groups = token.split(separator);
    let first = groups.next()?;
    let is_number = |group: &str| group.bytes().all(|byte| byte.is_ascii_digit());
    let is_grouped = (1..=3).contains(&first.len())
        && is_number(first)
        && groups.all(|group| group.len() == 3 && is_number(group))
        && matches!(
            separator,
            ',' | '.' | '_' | '\'' | '’' | '\u{a0}' | '\u{202f}'
        );
    is_grouped.then(|| token.replace(separator, ""))
}

fn is_identifier(token: &str) -> bool {
    let letters = token
        .chars()
        .filter(|c| is_of_word(*c) && !c.is_ascii_digit())
        .count();
    let digits = token.bytes().filter(u8::is_ascii_digit).count();
    if token.contains("://") || token.starts_with("www.") {
        return true;
    }
    if is_date(token) {
        return false;
    }
    let is_address = token.split_once('@').is_some_and(|(local, domain)| {
        local.ends_with(is_of_word) && domain.starts_with(is_of_word)
    });
    if is_address || is_file_name(token) || is_path(token) {
        return true;
    }
    let number = grouped_number(token);
    let mut numbers = token.split(|c: char| !c.is_ascii_digit());
    if number.is_some_and(|number| number.len() >= LONG_NUMBER)
        || numbers.any(|number| number.len() >= LONG_NUMBER)
    {
        return true;
    }
    let is_hash = token.len() >= 7 && token.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_mixed = letters > 0 && digits >= 3 && token.len() >= 8;
    is_mixed || is_hash && letters > 0 && digits >= 2
}

/// `2024-05-01`, also with a time: models write times in their own way.
fn is_date(token: &str) -> bool {
    let bytes = token.as_bytes();
    let digits = |range: std::ops::Range<usize>| {
        bytes
            .get(range)
            .is_some_and(|part| part.iter().all(u8::is_ascii_digit))
    };
    let is_sign = |index: usize| matches!(bytes.get(index), Some(b'-' | b'/' | b'.'));
    let has_time = || {
        bytes[10..]
            .iter()
            .all(|byte| byte.is_ascii_digit() || b"tz:.+-".contains(byte))
    };
    digits(0..4) && is_sign(4) && digits(5..7) && is_sign(7) && digits(8..10) && has_time()
}

fn is_file_name(token: &str) -> bool {
    let name = token.rsplit(['/', '\\']).next().unwrap_or(token);
    let name = name.split([':', '#', '?']).next().unwrap_or(name);
    name.rsplit_once('.').is_some_and(|(stem, extension)| {
        stem.chars().count() >= 2
            && (EXTENSIONS.contains(&extension) || DOMAINS.contains(&extension))
    })
}

fn is_path(token: &str) -> bool {
    let separators = token.matches(['/', '\\']).count();
    if separators == 0 {
        return false;
    }
    let has_root = ["/", "./", "../", "~/"]
        .iter()
        .any(|root| token.starts_with(root));
    let drive: Vec<char> = token.chars().take(3).collect();
    let has_drive = matches!(drive[..], [letter, ':', '/' | '\\'] if letter.is_ascii_alphabetic());
    let letters = token
        .chars()
        .filter(|c| is_of_word(*c) && !c.is_ascii_digit())
        .count();
    if letters < 2 {
        return false;
    }
    let mut parts = token.split(['/', '\\']);
    let is_name = |part: &str| part.contains('_') || is_file_name(part);
    has_root || has_drive || separators >= 3 || parts.any(is_name)
}

/// Without what a language joins to an identifier (`main.rs-Datei`), and without the line in `main.rs:42`.
fn without_words(token: &str) -> &str {
    let is_plain = |part: &str| {
        part.chars()
            .all(|c| c.is_alphabetic() || c == '\'' || c == '’')
    };
    let is_line = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let mut core = token;
    if core.contains("://") || core.contains('@') {
        return core;
    }
    while let Some((before, after)) = core.rsplit_once([':', '-', '=', '\'', '’']) {
        let is_suffix = is_plain(after) || core[before.len()..].starts_with(':') && is_line(after);
        if !is_suffix || before.is_empty() {
            break;
        }
        core = before;
    }
    while let Some((before, after)) = core.split_once([':', '-', '=']) {
        if !is_plain(before) || after.is_empty() {
            break;
        }
        core = after;
    }
    core
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let normal = normalise(text);
        let found: Vec<&str> = identifiers(&normal).collect();
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn identifiers_are_told_from_words() {
        check(
            "see /etc/hosts, `src/main.rs:42` and ~/x_y/.",
            &["/etc/hosts", "src/main.rs:42", "~/x_y"],
        );
        check("C:\\Temp\\a b.txt", &["c:\\temp\\a"]);
        check(
            "https://a.b/c?d=e#f. www.x.y",
            &["https://a.b/c?d=e#f", "www.x.y"],
        );
        check("write to ann@example.org!", &["ann@example.org"]);
        check(
            "ses_0193a1b2 INV-2024-17 2afc335 (v1)",
            &["ses_0193a1b2", "inv-2024-17", "2afc335"],
        );
        check("12345, 1234, 12,345 and 1 234", &["12345", "12,345"]);
        check("3.14159 and 3.14", &["3.14159"]);
        check("PR #12345; port=54321", &["12345", "port=54321"]);
        check("Cargo.toml, Node.js, e.g. this. That", &["cargo.toml"]);
        check("and/or, 24/7, TCP/IP, either/or/both, km/h, n/a", &[]);
        check("2024-05-01, 2024-05-01T10:00:00Z, 01/05/2024, 10:30am", &[]);
        check("GPT-4, UTF-8, COVID-19, 3rd, 100ms, 10k, v1.2.3", &[]);
        check("**bold** _word_ --force `-x` … (ok)", &[]);
    }

    #[test]
    fn scripts_without_spaces_end_an_identifier() {
        check(
            "请编辑/src/main.rs文件和报告2024.txt，编号１２３４５６。",
            &["/src/main.rs", "2024.txt", "123456"],
        );
        check("افتح الملفsrc/main.rsفي ١٢٣٤٥٦", &["src/main.rs", "123456"]);
        check(
            "파일 main.rs를 ไฟล์/tmp/a.txtแล้ว",
            &["main.rs", "/tmp/a.txt"],
        );
        check("файл отчёт.txt", &["отчёт.txt"]);
    }

    #[test]
    fn an_identifier_is_found_whole() {
        let mut haystack = Haystack::default();
        haystack.add("Edit /home/ann/src/Main.rs at https://x.org/a, commit 2afc335b1d0e, 1,234,567 and id=99887766");
        haystack.add("编号１２３４５，路径/数据/a_b");
        for there in [
            "/home/ann/src/main.rs",
            "src/main.rs",
            "main.rs",
            "main.rs:42",
            "main.rs-datei",
            "main.rs's",
            "https://x.org/a",
            "x.org",
            "2afc335b1d0e",
            "2afc335",
            "1,234,567",
            "1234567",
            "1.234.567",
            "id=99887766",
            "99887766",
            "99,887,766",
            "12345",
            "a_b",
        ] {
            assert!(haystack.contains(there), "{there}");
        }
        for invented in [
            "/home/bob/src/main.rs",
            "rc/main.rs",
            "ain.rs",
            "https://x.org/b",
            "2afc336",
            "afc335b",
            "1,234,568",
            "234567",
            "9988776",
            "9887766",
            "evil-1234567x",
        ] {
            assert!(!haystack.contains(invented), "{invented}");
        }
    }
}
