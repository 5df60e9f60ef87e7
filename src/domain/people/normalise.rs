//! How platforms compare external ids. Case is folded only where the platform folds it: two ids that
//! differ for the platform are two users, and merging them by mistake shows one the other's messages.

/// Stored with every identity. A change of the table is a new version and a migration.
pub const VERSION: i16 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// ASCII letters compare without case: logins, nicks, addresses.
    FoldAscii,
    /// An XMPP address without the device after the slash; the rest compares without case.
    BareAddress,
    /// A phone number without separators, with or without `+`, or as an address of WhatsApp's servers, of any
    /// device.
    WhatsApp,
    /// The same, but `+` distinguishes an international number from a local one.
    Phone,
    /// `@name` is a handle, which compares without case; anything else is an id and stays as it is.
    FoldHandle,
}

/// Platforms with rules of their own. On all others ids compare exactly.
const RULES: [(&str, Rule); 13] = [
    ("email", Rule::FoldAscii),
    ("imap", Rule::FoldAscii),
    ("irc", Rule::FoldAscii),
    ("twitch", Rule::FoldAscii),
    ("github", Rule::FoldAscii),
    ("gitlab", Rule::FoldAscii),
    ("mastodon", Rule::FoldAscii),
    ("bluesky", Rule::FoldAscii),
    ("xmpp", Rule::BareAddress),
    ("whatsapp", Rule::WhatsApp),
    ("sms", Rule::Phone),
    ("signal", Rule::Phone),
    ("telegram", Rule::FoldHandle),
];

/// The id that an identity is looked up by. Never empty unless `raw` is.
pub fn normalise(platform: &str, raw: &str) -> String {
    let rule = RULES.iter().find(|(name, _)| *name == platform);
    match rule.map(|(_, rule)| *rule) {
        None => raw.to_owned(),
        Some(Rule::FoldAscii) => raw.to_ascii_lowercase(),
        Some(Rule::BareAddress) => {
            let bare = raw.split_once('/').map_or(raw, |(bare, _)| bare);
            let bare = if bare.is_empty() { raw } else { bare };
            bare.to_lowercase()
        }
        Some(Rule::WhatsApp) => whatsapp(&raw.to_ascii_lowercase()),
        Some(Rule::Phone) => phone(raw).unwrap_or_else(|| raw.to_ascii_lowercase()),
        Some(Rule::FoldHandle) => {
            if raw.starts_with('@') {
                raw.to_ascii_lowercase()
            } else {
                raw.to_owned()
            }
        }
    }
}

/// `4930:7@s.whatsapp.net` is device 7 of the number 4930. Addresses of other servers are no numbers and
/// keep their server; their device is removed, too.
fn whatsapp(raw: &str) -> String {
    let (name, server) = match raw.split_once('@') {
        Some((name, server)) if !name.is_empty() => (name, Some(server)),
        Some(_) | None => (raw, None),
    };
    let is_device = |device: &str| device.bytes().all(|byte| byte.is_ascii_digit());
    let bare = match (server, name.split_once(':')) {
        (Some(_), Some((bare, device))) if !bare.is_empty() && is_device(device) => bare,
        (Some(_) | None, _) => name,
    };
    match (server, phone(bare)) {
        (None | Some("s.whatsapp.net" | "c.us"), Some(number)) => {
            number.trim_start_matches('+').to_owned()
        }
        (Some(server), _) => format!("{bare}@{server}"),
        (None, None) => raw.to_owned(),
    }
}

/// `raw` as a phone number, if it is one: an optional `+`, then digits and separators.
fn phone(raw: &str) -> Option<String> {
    let (plus, rest) = match raw.strip_prefix('+') {
        Some(rest) => ("+", rest),
        None => ("", raw),
    };
    let is_allowed = |c: char| c.is_ascii_digit() || matches!(c, ' ' | '-' | '.' | '(' | ')');
    let digits: String = rest.chars().filter(char::is_ascii_digit).collect();
    (rest.chars().all(is_allowed) && !digits.is_empty()).then(|| format!("{plus}{digits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_compared_as_their_platform_compares_them() {
        for (platform, raw, normalised) in [
            ("irc", "Bob", "bob"),
            ("irc", "Bob[1]", "bob[1]"),
            ("email", "Ann@Example.ORG", "ann@example.org"),
            ("github", "OctoCat", "octocat"),
            ("xmpp", "Ann@Example.org/phone", "ann@example.org"),
            ("xmpp", "/x", "/x"),
            ("whatsapp", "+49 (30) 12-34", "49301234"),
            ("whatsapp", "49301234", "49301234"),
            ("whatsapp", "4930@S.whatsapp.net", "4930"),
            ("whatsapp", "4930:7@s.whatsapp.net", "4930"),
            ("whatsapp", "4930@c.us", "4930"),
            ("whatsapp", "1203630:12@lid", "1203630@lid"),
            ("whatsapp", "4930-15@g.us", "4930-15@g.us"),
            ("whatsapp", "ann:7@s.whatsapp.net", "ann@s.whatsapp.net"),
            ("whatsapp", "@s.whatsapp.net", "@s.whatsapp.net"),
            ("sms", "+49 30 1234", "+49301234"),
            ("sms", "030 1234", "0301234"),
            ("signal", "0A1B-ff", "0a1b-ff"),
            ("telegram", "123", "123"),
            ("telegram", "@Ann", "@ann"),
            ("telegram", "Ann", "Ann"),
            // These platforms compare with case.
            ("matrix", "@Ann:example.org", "@Ann:example.org"),
            ("slack", "U012AbC", "U012AbC"),
            ("feishu", "ou_X", "ou_X"),
            ("web", "Ünï", "Ünï"),
            ("discord", " 5", " 5"),
        ] {
            assert_eq!(normalise(platform, raw), normalised, "{platform}:{raw}");
        }
    }

    #[test]
    fn normalising_twice_changes_nothing() {
        for (platform, _) in RULES {
            for raw in [
                "Bob",
                "@Bob",
                "+1 (2) 3",
                "A@B.c/D",
                "1:2@s.whatsapp.net",
                "a:1:2@b",
                "1:@c.us",
                "-",
                "+",
                "/",
                "ÄÖ",
            ] {
                let once = normalise(platform, raw);
                assert!(!once.is_empty(), "{platform}:{raw}");
                assert_eq!(normalise(platform, &once), once, "{platform}:{raw}");
            }
        }
    }
}
