//! The rules of an agent beyond its types. Each error has a pointer.

use serde_json::Value;

use crate::domain::people::platform::PlatformScope;
use crate::domain::tenant::agent::{AgentSpec, KeyChange, Upstream, UpstreamKind};
use crate::error::FieldError;

const MAX_PROMPT_CHARS: usize = 100_000;
pub(in crate::domain) const MAX_ENTRIES: usize = 100;

impl AgentSpec {
    /// Validates the rules beyond the types.
    pub fn check(&self) -> Vec<FieldError> {
        let mut errors = Errors(Vec::new());
        errors.text("/system_prompt", &self.system_prompt, 0, MAX_PROMPT_CHARS);
        errors.number("/context_window", self.context_window, 1000, 10_000_000);
        errors.number("/max_tool_rounds", self.max_tool_rounds, 0, 100);
        errors.number("/offer_window_hours", self.offer_window_hours, 0, 720);
        self.upstream.check(&mut errors);
        if let Some(model) = &self.compression.summary_model {
            errors.text("/compression/summary_model", model, 1, 200);
        }
        errors.fraction(
            "/compression/threshold",
            self.compression.threshold,
            0.1,
            0.95,
        );
        errors.fraction(
            "/compression/tail_ratio",
            self.compression.tail_ratio,
            0.05,
            0.9,
        );
        errors.reset("/reset", self.reset.idle_minutes, self.reset.at_hour);
        for (chat_type, rule) in &self.reset.by_chat_type {
            let name = serde_json::to_value(chat_type).unwrap_or(Value::Null);
            let pointer = format!("/reset/by_chat_type/{}", name.as_str().unwrap_or_default());
            errors.reset(&pointer, rule.idle_minutes, rule.at_hour);
        }
        errors.platforms("/reset/by_platform", self.reset.by_platform.keys());
        for (platform, rule) in &self.reset.by_platform {
            let pointer = format!("/reset/by_platform/{platform}");
            errors.reset(&pointer, rule.idle_minutes, rule.at_hour);
        }
        errors.platforms("/toolsets", self.toolsets.keys());
        errors.platforms("/home_channels", self.home_channels.keys());
        for (platform, channel) in &self.home_channels {
            errors.text(
                &format!("/home_channels/{platform}/id"),
                &channel.id,
                1,
                256,
            );
            if let Some(thread) = &channel.thread_id {
                errors.text(
                    &format!("/home_channels/{platform}/thread_id"),
                    thread,
                    1,
                    256,
                );
            }
        }
        errors.0
    }
}

impl Upstream {
    fn check(&self, errors: &mut Errors) {
        let model = self.model.as_deref().unwrap_or_default();
        errors.number("/upstream/timeout_seconds", self.timeout_seconds, 1, 3600);
        match self.kind {
            UpstreamKind::Openai => {
                errors.text("/upstream/model", model, 1, 200);
                if self.base_url.is_none() {
                    errors.push(
                        "/upstream/base_url",
                        "is needed with kind openai".to_owned(),
                    );
                }
                if let KeyChange::Set(key) = &self.api_key {
                    errors.text("/upstream/api_key", key, 1, 4096);
                }
            }
            UpstreamKind::Demo => {
                let members = [
                    ("/upstream/base_url", self.base_url.is_some()),
                    ("/upstream/model", self.model.is_some()),
                    (
                        "/upstream/api_key",
                        matches!(self.api_key, KeyChange::Set(_)),
                    ),
                ];
                for (pointer, _) in members.into_iter().filter(|(_, given)| *given) {
                    errors.push(pointer, "the demo model has none".to_owned());
                }
            }
        }
    }
}

struct Errors(Vec<FieldError>);

impl Errors {
    fn push(&mut self, pointer: &str, detail: String) {
        self.0.push(FieldError::new(pointer, detail));
    }

    fn text(&mut self, pointer: &str, text: &str, min: usize, max: usize) {
        if !(min..=max).contains(&text.chars().count()) {
            self.push(pointer, format!("must have {min} to {max} characters"));
        }
    }

    fn number(&mut self, pointer: &str, number: u32, min: u32, max: u32) {
        if !(min..=max).contains(&number) {
            self.push(pointer, format!("must be from {min} to {max}"));
        }
    }

    fn fraction(&mut self, pointer: &str, number: f64, min: f64, max: f64) {
        if !(min..=max).contains(&number) {
            self.push(pointer, format!("must be from {min} to {max}"));
        }
    }

    fn reset(&mut self, pointer: &str, idle_minutes: u32, at_hour: u32) {
        self.number(&format!("{pointer}/idle_minutes"), idle_minutes, 1, 525_600);
        self.number(&format!("{pointer}/at_hour"), at_hour, 0, 23);
    }

    fn platforms<'a>(&mut self, pointer: &str, names: impl ExactSizeIterator<Item = &'a String>) {
        if names.len() > MAX_ENTRIES {
            self.push(pointer, format!("must have at most {MAX_ENTRIES} members"));
        }
        for name in names {
            if let Err(problem) = name.parse::<PlatformScope>() {
                self.push(pointer, format!("{name:?}: {problem}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(changes: Value) -> Result<AgentSpec, String> {
        let mut document = json!({"upstream": {"kind": "demo"}});
        for (member, value) in changes.as_object().unwrap() {
            document[member] = value.clone();
        }
        serde_json::from_value(document).map_err(|error| error.to_string())
    }

    #[test]
    fn every_member_but_the_upstream_has_a_default() {
        assert_eq!(spec(json!({})), Ok(AgentSpec::demo()));
        assert_eq!(AgentSpec::demo().check(), Vec::new());
        assert!(serde_json::from_value::<AgentSpec>(json!({})).is_err());
    }

    #[test]
    fn the_key_is_never_stored_or_printed() {
        let with_key =
            json!({"kind": "openai", "base_url": "https://x", "model": "m", "api_key": "canary"});
        let agent = spec(json!({ "upstream": with_key })).unwrap();
        assert_eq!(agent.upstream.api_key, KeyChange::Set("canary".to_owned()));
        assert!(!serde_json::to_string(&agent).unwrap().contains("canary"));
        assert!(!format!("{agent:?}").contains("canary"));
    }

    #[test]
    fn the_stored_document_round_trips() {
        let original = spec(json!({
            "upstream": {"kind": "openai", "base_url": "https://x/v1", "model": "m"},
            "dm_scope": "per-account-channel-peer",
            "reset": {"mode": "both", "by_chat_type": {"dm": {"mode": "idle", "idle_minutes": 5}}},
            "home_channels": {"slack@T1": {"id": "C1"}},
        }))
        .unwrap();
        let stored = serde_json::to_value(&original).unwrap();
        assert_eq!(stored["dm_scope"], "per-channel-peer");
        assert_eq!(
            serde_json::from_value::<AgentSpec>(stored).unwrap(),
            original
        );
    }

    #[test]
    fn every_error_has_a_pointer() {
        for (changes, pointer) in [
            (
                json!({"upstream": {"kind": "openai", "model": "m"}}),
                "/upstream/base_url",
            ),
            (
                json!({"upstream": {"kind": "openai", "base_url": "https://x"}}),
                "/upstream/model",
            ),
            (
                json!({"upstream": {"kind": "demo", "api_key": "k"}}),
                "/upstream/api_key",
            ),
            (json!({"context_window": 1}), "/context_window"),
            (json!({"max_tool_rounds": 101}), "/max_tool_rounds"),
            (
                json!({"system_prompt": "x".repeat(100_001)}),
                "/system_prompt",
            ),
            (json!({"reset": {"at_hour": 24}}), "/reset/at_hour"),
            (
                json!({"reset": {"by_platform": {"irc": {"mode": "idle", "idle_minutes": 0}}}}),
                "/reset/by_platform/irc/idle_minutes",
            ),
            (
                json!({"compression": {"threshold": 2.0}}),
                "/compression/threshold",
            ),
            (json!({"toolsets": {"DM": []}}), "/toolsets"),
            (
                json!({"home_channels": {"irc": {"id": ""}}}),
                "/home_channels/irc/id",
            ),
        ] {
            let errors = spec(changes).unwrap().check();
            assert_eq!(
                errors.first().map(|e| e.pointer.as_str()),
                Some(pointer),
                "{errors:?}"
            );
        }
    }
}
