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
    Link(LinkCommand),
    Unlink,
    SetHome,
    Stop,
    Help,
    /// A command that is reserved, and not available yet.
    Reserved(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkCommand {
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
    let word = word.to_ascii_lowercase();
    let row = COMMANDS.iter().find(|row| row.name == word)?;
    Some((row.parse)(argument))
}

/// A slash command.
pub struct SlashCommand {
    /// Without the slash.
    pub name: &'static str,
    /// The form of its argument, in brackets if it is optional.
    pub argument: &'static str,
    /// What it does, as `/help` lists it. None while it is not available.
    pub help: Option<&'static str>,
    parse: fn(&str) -> Command,
}

const fn row(
    name: &'static str,
    argument: &'static str,
    help: &'static str,
    parse: fn(&str) -> Command,
) -> SlashCommand {
    SlashCommand {
        name,
        argument,
        help: Some(help),
        parse,
    }
}

const fn reserved(
    name: &'static str,
    argument: &'static str,
    parse: fn(&str) -> Command,
) -> SlashCommand {
    SlashCommand {
        name,
        argument,
        help: None,
        parse,
    }
}

/// Every command, in the order of `/help`.
pub const COMMANDS: &[SlashCommand] = &[
    row("new", "[title]", "start a new session", |title| {
        Command::New {
            title: given(title),
        }
    }),
    row("reset", "", "the same, without a title", |_| Command::Reset),
    row("sessions", "", "list the sessions here", |_| {
        Command::Sessions
    }),
    row(
        "resume",
        "[number, title or id]",
        "continue one of them",
        |which| Command::Resume {
            which: given(which),
        },
    ),
    row("branch", "[name]", "continue in a copy", |name| {
        Command::Branch { name: given(name) }
    }),
    row("title", "[name]", "show or change the title", |name| {
        Command::Title { name: given(name) }
    }),
    row(
        "undo",
        "[n]",
        "undo your last n messages and their answers",
        |turns| Command::Undo {
            turns: turns.parse().unwrap_or(1).clamp(1, MAX_UNDO),
        },
    ),
    row("retry", "", "answer your last message again", |_| {
        Command::Retry
    }),
    row("stop", "", "stop the running answer", |_| Command::Stop),
    row("status", "", "show the state of this conversation", |_| {
        Command::Status
    }),
    row(
        "link",
        "",
        "show a code to link another account of yours; /link CODE: link the account that shows it",
        |argument| Command::Link(link(argument)),
    ),
    row("unlink", "", "unlink this account from your others", |_| {
        Command::Unlink
    }),
    row(
        "sethome",
        "",
        "get messages from the service here on this platform",
        |_| Command::SetHome,
    ),
    row("help", "", "show this list", |_| Command::Help),
    reserved("compress", "[focus]", |_| Command::Reserved("compress")),
    reserved("save", "", |_| Command::Reserved("save")),
    reserved("handoff", "platform", |_| Command::Reserved("handoff")),
    reserved("continue", "[code]", |_| Command::Reserved("continue")),
];

fn given(argument: &str) -> Option<String> {
    (!argument.is_empty()).then(|| argument.to_owned())
}

fn link(argument: &str) -> LinkCommand {
    if argument.eq_ignore_ascii_case("yes") {
        LinkCommand::Yes
    } else {
        given(argument).map_or(LinkCommand::Show, LinkCommand::Code)
    }
}

impl Command {
    /// Whether it reads or changes data that the other members of a chat must not see.
    pub fn is_private(&self) -> bool {
        match self {
            Self::Link(_) | Self::Unlink | Self::SetHome => true,
            Self::Reserved(name) => matches!(*name, "handoff" | "continue"),
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

/// The answer to `/help`.
pub fn help() -> String {
    let mut lines = Vec::new();
    for SlashCommand {
        name,
        argument,
        help,
        ..
    } in COMMANDS
    {
        let space = if argument.is_empty() { "" } else { " " };
        lines.extend(help.map(|help| format!("/{name}{space}{argument}: {help}")));
    }
    lines.push("A text that starts with // goes to the assistant with one slash.".to_owned());
    lines.join("\n")
}

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
            (
                "/link",
                ParsedText::Command(Command::Link(LinkCommand::Show)),
            ),
            (
                "/link Yes",
                ParsedText::Command(Command::Link(LinkCommand::Yes)),
            ),
            (
                "/link ABCD2345",
                ParsedText::Command(Command::Link(LinkCommand::Code("ABCD2345".to_owned()))),
            ),
            (
                "/handoff telegram",
                ParsedText::Command(Command::Reserved("handoff")),
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
    fn help_has_a_line_for_each_available_command() {
        let help = help();
        assert!(help.starts_with("/new [title]: start a new session\n/reset: the same"));
        for row in COMMANDS {
            let text = format!("/{}", row.name);
            let command = parse(&text);
            let is_reserved = matches!(command, ParsedText::Command(Command::Reserved(_)));
            assert_eq!(is_reserved, row.help.is_none(), "{}", row.name);
            assert_eq!(!is_reserved, help.contains(&format!("/{}", row.name)));
        }
    }
}
