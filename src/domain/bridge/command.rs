//! Slash commands in the text of messages. `//` escapes; text without a command goes to the agent.

/// A command to the service itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    New {
        title: Option<String>,
    },
    Reset,
    Resume {
        which: Option<String>,
    },
    Sessions,
    Branch {
        name: Option<String>,
    },
    Title {
        name: Option<String>,
    },
    Undo {
        turns: u32,
    },
    Retry,
    Status,
    Link(Link),
    Unlink,
    SetHome,
    Stop,
    Help,
    /// A command that is reserved, and not available yet.
    NotYet(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Create and show a link code.
    Show,
    /// Preview the merge for this code.
    Code(String),
    /// Confirm the merge.
    Yes,
}

/// The text of a message: a command, or text for the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedText<'a> {
    Command(Command),
    /// Text for the agent, without the escape.
    Text(&'a str),
}

/// The most turns that one `/undo` can undo.
const MAX_UNDO: u32 = 50;

pub fn parse(text: &str) -> ParsedText<'_> {
    let trimmed = text.trim();
    if trimmed.starts_with("//") {
        let start = text.len() - text.trim_start().len();
        return ParsedText::Text(&text[start + 1..]);
    }
    match command(trimmed) {
        Some(command) => ParsedText::Command(command),
        None => ParsedText::Text(text),
    }
}

fn command(text: &str) -> Option<Command> {
    let rest = text.strip_prefix('/')?;
    let (word, argument) = match rest.split_once(char::is_whitespace) {
        Some((word, argument)) => (word, argument.trim()),
        None => (rest, ""),
    };
    // In groups, platforms append the name of the bot: /new@our_bot.
    let word = word.split('@').next().unwrap_or_default();
    let argument_text = (!argument.is_empty()).then(|| argument.to_owned());
    Some(match word.to_ascii_lowercase().as_str() {
        "new" => Command::New {
            title: argument_text,
        },
        "reset" => Command::Reset,
        "resume" => Command::Resume {
            which: argument_text,
        },
        "sessions" => Command::Sessions,
        "branch" => Command::Branch {
            name: argument_text,
        },
        "title" => Command::Title {
            name: argument_text,
        },
        "undo" => Command::Undo {
            turns: argument.parse().unwrap_or(1).clamp(1, MAX_UNDO),
        },
        "retry" => Command::Retry,
        "status" => Command::Status,
        "link" if argument.eq_ignore_ascii_case("yes") => Command::Link(Link::Yes),
        "link" => Command::Link(argument_text.map_or(Link::Show, Link::Code)),
        "unlink" => Command::Unlink,
        "sethome" => Command::SetHome,
        "stop" => Command::Stop,
        "help" => Command::Help,
        "compress" => Command::NotYet("compress"),
        "save" => Command::NotYet("save"),
        "handoff" => Command::NotYet("handoff"),
        "continue" => Command::NotYet("continue"),
        _ => return None,
    })
}

impl Command {
    /// Whether it reads or changes data that the other members of a chat must not see.
    pub fn is_private(&self) -> bool {
        match self {
            Self::Link(_) | Self::Unlink | Self::SetHome => true,
            Self::NotYet(name) => matches!(*name, "handoff" | "continue"),
            Self::New { .. }
            | Self::Reset
            | Self::Resume { .. }
            | Self::Sessions
            | Self::Branch { .. }
            | Self::Title { .. }
            | Self::Undo { .. }
            | Self::Retry
            | Self::Status
            | Self::Stop
            | Self::Help => false,
        }
    }
}

pub const HELP: &str = "\
/new [title]: start a new session
/reset: the same, without a title
/sessions: list the sessions here
/resume [number, title or id]: continue one of them
/branch [name]: continue in a copy
/title [name]: show or change the title
/undo [n]: undo your last n messages and their answers
/retry: answer your last message again
/stop: stop the running answer
/status: show the state of this conversation
/link: show a code to link another account of yours; /link CODE: link the account that shows it
/unlink: unlink this account from your others
/sethome: get messages from the service here on this platform
/help: show this list
A text that starts with // goes to the assistant with one slash.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_parsed_and_other_text_goes_to_the_agent() {
        let some = |text: &str| Some(text.to_owned());
        for (text, expected) in [
            ("/new", ParsedText::Command(Command::New { title: None })),
            (
                "  /NEW My trip ",
                ParsedText::Command(Command::New {
                    title: some("My trip"),
                }),
            ),
            (
                "/new@our_bot x",
                ParsedText::Command(Command::New { title: some("x") }),
            ),
            ("/reset", ParsedText::Command(Command::Reset)),
            (
                "/resume 2",
                ParsedText::Command(Command::Resume { which: some("2") }),
            ),
            ("/undo", ParsedText::Command(Command::Undo { turns: 1 })),
            ("/undo 3", ParsedText::Command(Command::Undo { turns: 3 })),
            ("/undo 0", ParsedText::Command(Command::Undo { turns: 1 })),
            (
                "/undo many",
                ParsedText::Command(Command::Undo { turns: 1 }),
            ),
            (
                "/undo 4000000000",
                ParsedText::Command(Command::Undo { turns: MAX_UNDO }),
            ),
            ("/link", ParsedText::Command(Command::Link(Link::Show))),
            ("/link Yes", ParsedText::Command(Command::Link(Link::Yes))),
            (
                "/link ABCD2345",
                ParsedText::Command(Command::Link(Link::Code("ABCD2345".to_owned()))),
            ),
            (
                "/handoff telegram",
                ParsedText::Command(Command::NotYet("handoff")),
            ),
            ("//new", ParsedText::Text("/new")),
            (" //new", ParsedText::Text("/new")),
            ("/unknown thing", ParsedText::Text("/unknown thing")),
            ("/", ParsedText::Text("/")),
            ("a /new", ParsedText::Text("a /new")),
            ("", ParsedText::Text("")),
        ] {
            assert_eq!(parse(text), expected, "{text}");
        }
    }

    #[test]
    fn help_names_every_available_command() {
        for word in [
            "new", "reset", "resume", "sessions", "branch", "title", "undo", "retry", "status",
            "link", "unlink", "sethome", "stop", "help",
        ] {
            assert!(HELP.contains(&format!("/{word}")), "{word}");
            assert!(
                !matches!(parse(&format!("/{word}")), ParsedText::Text(_)),
                "{word}"
            );
        }
    }
}
