//! Slash commands in what people write. `//` escapes; what is no command of ours goes to the agent.

/// What somebody asks the service itself to do.
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
    /// Known, and not here yet.
    NotYet(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Show a code.
    Show,
    /// Show who would be joined by this one.
    Code(String),
    /// Do it.
    Yes,
}

/// What a text is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said<'a> {
    Command(Command),
    /// For the agent, without the escape.
    Text(&'a str),
}

/// As many turns as one `/undo` takes back.
const MAX_UNDO: u32 = 50;

pub fn read(text: &str) -> Said<'_> {
    let trimmed = text.trim();
    if trimmed.starts_with("//") {
        let start = text.len() - text.trim_start().len();
        return Said::Text(&text[start + 1..]);
    }
    match command(trimmed) {
        Some(command) => Said::Command(command),
        None => Said::Text(text),
    }
}

fn command(text: &str) -> Option<Command> {
    let rest = text.strip_prefix('/')?;
    let (word, argument) = match rest.split_once(char::is_whitespace) {
        Some((word, argument)) => (word, argument.trim()),
        None => (rest, ""),
    };
    // In groups platforms add the name of the bot: /new@our_bot.
    let word = word.split('@').next().unwrap_or_default();
    let given = (!argument.is_empty()).then(|| argument.to_owned());
    Some(match word.to_ascii_lowercase().as_str() {
        "new" => Command::New { title: given },
        "reset" => Command::Reset,
        "resume" => Command::Resume { which: given },
        "sessions" => Command::Sessions,
        "branch" => Command::Branch { name: given },
        "title" => Command::Title { name: given },
        "undo" => Command::Undo {
            turns: argument.parse().unwrap_or(1).clamp(1, MAX_UNDO),
        },
        "retry" => Command::Retry,
        "status" => Command::Status,
        "link" if argument.eq_ignore_ascii_case("yes") => Command::Link(Link::Yes),
        "link" => Command::Link(given.map_or(Link::Show, Link::Code)),
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
    /// Whether it shows or changes what others in a chat must not see.
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
/new [title]: begin a new session
/reset: the same, without a title
/sessions: list the sessions here
/resume [number, title or id]: go on with one of them
/branch [name]: go on in a copy
/title [name]: show or change the title
/undo [n]: take back the last n of your messages and their answers
/retry: have your last message answered again
/stop: stop the answer that is being written
/status: where this conversation stands
/link: show a code that joins another account of yours; /link CODE: join the one that shows it
/unlink: part this account from your others
/sethome: be reached here on this platform
/help: this list
A text that begins with // is sent to the assistant with one slash.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_and_everything_else_goes_to_the_agent() {
        let some = |text: &str| Some(text.to_owned());
        for (text, said) in [
            ("/new", Said::Command(Command::New { title: None })),
            (
                "  /NEW My trip ",
                Said::Command(Command::New {
                    title: some("My trip"),
                }),
            ),
            (
                "/new@our_bot x",
                Said::Command(Command::New { title: some("x") }),
            ),
            ("/reset", Said::Command(Command::Reset)),
            (
                "/resume 2",
                Said::Command(Command::Resume { which: some("2") }),
            ),
            ("/undo", Said::Command(Command::Undo { turns: 1 })),
            ("/undo 3", Said::Command(Command::Undo { turns: 3 })),
            ("/undo 0", Said::Command(Command::Undo { turns: 1 })),
            ("/undo many", Said::Command(Command::Undo { turns: 1 })),
            (
                "/undo 4000000000",
                Said::Command(Command::Undo { turns: MAX_UNDO }),
            ),
            ("/link", Said::Command(Command::Link(Link::Show))),
            ("/link Yes", Said::Command(Command::Link(Link::Yes))),
            (
                "/link ABCD2345",
                Said::Command(Command::Link(Link::Code("ABCD2345".to_owned()))),
            ),
            (
                "/handoff telegram",
                Said::Command(Command::NotYet("handoff")),
            ),
            ("//new", Said::Text("/new")),
            (" //new", Said::Text("/new")),
            ("/unknown thing", Said::Text("/unknown thing")),
            ("/", Said::Text("/")),
            ("a /new", Said::Text("a /new")),
            ("", Said::Text("")),
        ] {
            assert_eq!(read(text), said, "{text}");
        }
    }

    #[test]
    fn help_names_every_command_that_is_here() {
        for word in [
            "new", "reset", "resume", "sessions", "branch", "title", "undo", "retry", "status",
            "link", "unlink", "sethome", "stop", "help",
        ] {
            assert!(HELP.contains(&format!("/{word}")), "{word}");
            assert!(
                !matches!(read(&format!("/{word}")), Said::Text(_)),
                "{word}"
            );
        }
    }
}
