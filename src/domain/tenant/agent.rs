//! An agent: a tenant's named assistant. Everything but its upstream has a default; the document is
//! stored as the tenant wrote it, with the defaults filled in.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::domain::people::platform::PlatformScope;

/// The agent of a request that names none. Every tenant has it.
pub const DEFAULT_AGENT: &str = "main";
const MAX_TOOL_CHARS: usize = 200;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentSpec {
    pub upstream: Upstream,
    #[serde(default)]
    #[schema(max_length = 100_000)]
    pub system_prompt: String,
    /// Tokens the model can see at once.
    #[serde(default = "default_context_window")]
    #[schema(minimum = 1000, maximum = 10_000_000)]
    pub context_window: u32,
    #[serde(default = "default_tool_rounds")]
    #[schema(minimum = 0, maximum = 100)]
    pub max_tool_rounds: u32,
    /// How the DMs of an unlinked user are divided into sessions; null takes the tenant's default.
    #[serde(default)]
    pub dm_scope: Option<DmScope>,
    #[serde(default)]
    pub linked_sessions: LinkedSessions,
    #[serde(default)]
    pub group_scope: GroupScope,
    /// Whether MCP tools are offered in groups. Stored, not used yet.
    #[serde(default)]
    pub group_tools: bool,
    #[serde(default)]
    pub reset: ResetPolicy,
    /// Stored, not used yet: a transcript that is longer than the context window is cut at its beginning.
    #[serde(default)]
    pub compression: Compression,
    /// The tools offered on each platform; `no_mcp` turns MCP tools off. Stored, not used yet.
    #[serde(default)]
    #[schema(value_type = BTreeMap<PlatformScope, Vec<ToolName>>)]
    pub toolsets: BTreeMap<String, Vec<ToolName>>,
    /// The target of a handoff to a platform on which the user has no home channel. Stored, not used yet.
    #[serde(default)]
    #[schema(value_type = BTreeMap<PlatformScope, HomeChannel>)]
    pub home_channels: BTreeMap<String, HomeChannel>,
    #[serde(default)]
    pub on_busy: OnBusy,
    /// How long after a message elsewhere a conversation is offered here. Stored, not used yet.
    #[serde(default = "default_offer_window")]
    #[schema(minimum = 0, maximum = 720)]
    pub offer_window_hours: u32,
}

/// The model behind an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upstream {
    pub kind: UpstreamKind,
    /// The base URL of an OpenAI-compatible server, including its `/v1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 2048)]
    pub base_url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 200)]
    pub model: Option<String>,
    /// Write-only. Null deletes the stored key; leaving the member out keeps it while the address stays
    /// the same.
    #[serde(default, skip_serializing_if = "KeyChange::is_write_only")]
    #[schema(value_type = Option<String>, write_only, min_length = 1, max_length = 4096)]
    pub api_key: KeyChange,
    /// Sends `X-Hermes-Session-Key` upstream, so that a memory provider there is scoped by it.
    #[serde(default)]
    pub forward_session_key: bool,
    /// The model's read timeout in seconds: before the first byte, between two chunks of a stream, and in
    /// all for an answer that is not streamed. A waiting client is not disconnected earlier.
    #[serde(default = "default_timeout")]
    #[schema(minimum = 1, maximum = 3600)]
    pub timeout_seconds: u32,
}

/// The timeout of the official clients.
const DEFAULT_TIMEOUT_SECONDS: u32 = 600;

const fn default_timeout() -> u32 {
    DEFAULT_TIMEOUT_SECONDS
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UpstreamKind {
    /// Any server that speaks OpenAI's protocol.
    Openai,
    /// A built-in model with deterministic answers, which identify it as the demo model.
    Demo,
}

/// A request's change of the upstream's key. Never stored, never printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub enum KeyChange {
    #[default]
    Keep,
    Drop,
    Set(String),
}

impl std::fmt::Debug for KeyChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Keep => "Keep",
            Self::Drop => "Drop",
            Self::Set(_) => "Set(…)",
        })
    }
}

impl KeyChange {
    /// `skip_serializing` would remove the member from the documented request too.
    fn is_write_only(&self) -> bool {
        true
    }
}

impl Serialize for KeyChange {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_none()
    }
}

impl<'de> Deserialize<'de> for KeyChange {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Option::<String>::deserialize(deserializer)? {
            Some(key) => Self::Set(key),
            None => Self::Drop,
        })
    }
}

/// A tool's name in an agent's toolsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolName(String);

wire_text!(ToolName, r"^[\s\S]+$", 1, MAX_TOOL_CHARS);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a tool's name has 1 to {MAX_TOOL_CHARS} characters")]
pub struct InvalidToolName;

impl FromStr for ToolName {
    type Err = InvalidToolName;

    fn from_str(text: &str) -> Result<Self, InvalidToolName> {
        if (1..=MAX_TOOL_CHARS).contains(&text.chars().count()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidToolName)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DmScope {
    /// `per-account-channel-peer` is accepted and means the same: accounts are scopes of a platform.
    #[serde(alias = "per-account-channel-peer")]
    PerChannelPeer,
    PerPeer,
    Main,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LinkedSessions {
    #[default]
    Shared,
    Separate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScope {
    #[default]
    PerMember,
    Shared,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBusy {
    #[default]
    Queue,
    Reject,
    Interrupt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResetMode {
    #[default]
    None,
    Idle,
    Daily,
    Both,
}

/// When a conversation is reset automatically.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ResetPolicy {
    pub mode: ResetMode,
    #[schema(minimum = 1, maximum = 525_600)]
    pub idle_minutes: u32,
    /// The hour of `daily`, in the user's time zone.
    #[schema(minimum = 0, maximum = 23)]
    pub at_hour: u32,
    #[schema(value_type = BTreeMap<PlatformScope, ResetRule>)]
    pub by_platform: BTreeMap<String, ResetRule>,
    pub by_chat_type: BTreeMap<ChatType, ResetRule>,
}

impl Default for ResetPolicy {
    fn default() -> Self {
        Self {
            mode: ResetMode::None,
            idle_minutes: default_idle_minutes(),
            at_hour: default_at_hour(),
            by_platform: BTreeMap::new(),
            by_chat_type: BTreeMap::new(),
        }
    }
}

/// The reset rule of one platform or one type of chat, in place of the agent's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResetRule {
    pub mode: ResetMode,
    #[serde(default = "default_idle_minutes")]
    #[schema(minimum = 1, maximum = 525_600)]
    pub idle_minutes: u32,
    #[serde(default = "default_at_hour")]
    #[schema(minimum = 0, maximum = 23)]
    pub at_hour: u32,
}

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum ChatType {
    Dm,
    Group,
    Channel,
    Thread,
}

/// When a conversation is compressed automatically. Stored, not used yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Compression {
    /// Stored, not used yet.
    pub enabled: bool,
    /// The share of the context window at which a conversation is compressed. Stored, not used yet.
    #[schema(minimum = 0.1, maximum = 0.95)]
    pub threshold: f64,
    /// The share of the threshold that the kept tail may fill. Stored, not used yet.
    #[schema(minimum = 0.05, maximum = 0.9)]
    pub tail_ratio: f64,
    /// The model that writes summaries; null takes the agent's own. Stored, not used yet.
    #[schema(min_length = 1, max_length = 200)]
    pub summary_model: Option<String>,
}

impl Default for Compression {
    fn default() -> Self {
        Self {
            enabled: true,
            threshold: 0.5,
            tail_ratio: 0.2,
            summary_model: None,
        }
    }
}

/// A chat on a platform.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HomeChannel {
    #[schema(min_length = 1, max_length = 256)]
    pub id: String,
    #[serde(default)]
    #[schema(min_length = 1, max_length = 256)]
    pub thread_id: Option<String>,
}

fn default_context_window() -> u32 {
    128_000
}

fn default_tool_rounds() -> u32 {
    16
}

fn default_offer_window() -> u32 {
    24
}

fn default_idle_minutes() -> u32 {
    24 * 60
}

fn default_at_hour() -> u32 {
    4
}

impl AgentSpec {
    /// The agent of a new tenant.
    pub fn demo() -> Self {
        Self {
            upstream: Upstream {
                kind: UpstreamKind::Demo,
                base_url: None,
                model: None,
                api_key: KeyChange::Keep,
                forward_session_key: false,
                timeout_seconds: default_timeout(),
            },
            system_prompt: String::new(),
            context_window: default_context_window(),
            max_tool_rounds: default_tool_rounds(),
            dm_scope: None,
            linked_sessions: LinkedSessions::default(),
            group_scope: GroupScope::default(),
            group_tools: false,
            reset: ResetPolicy::default(),
            compression: Compression::default(),
            toolsets: BTreeMap::new(),
            home_channels: BTreeMap::new(),
            on_busy: OnBusy::default(),
            offer_window_hours: default_offer_window(),
        }
    }
}
