//! What a tenant may use. An operator changes single limits; the rest keep their defaults.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::error::{Code, Error, FieldError, Result};

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident, $default:tt, $least:tt, $most:tt;)+) => {
        /// The limits that apply to a tenant.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
        pub struct Limits { $($(#[$doc])* pub $name: u32),+ }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($name: $default),+ }
            }
        }

        /// The limits that an operator changed. Wide numbers, so that one out of range is told as such.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitOverrides {
            $(
                $(#[$doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schema(minimum = $least, maximum = $most)]
                pub $name: Option<i64>
            ),+
        }

        /// Changes of single limits: null gives one its default again, what is left out stays.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitChanges {
            $(
                $(#[$doc])*
                #[serde(deserialize_with = "given")]
                #[schema(minimum = $least, maximum = $most, value_type = Option<i64>)]
                pub $name: Option<Option<i64>>
            ),+
        }

        impl LimitChanges {
            /// The limits that get another value.
            pub fn overrides(&self) -> LimitOverrides {
                LimitOverrides { $($name: self.$name.flatten()),+ }
            }

            /// The names of those that get their default again.
            pub fn dropped(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(
                    if self.$name == Some(None) {
                        names.push(stringify!($name));
                    }
                )+
                names
            }
        }

        impl LimitOverrides {
            /// What breaks a bound, with pointers.
            pub fn errors(&self) -> Vec<FieldError> {
                let mut errors = Vec::new();
                $(
                    if self.$name.is_some_and(|value| !($least..=$most).contains(&value)) {
                        let detail = concat!("must be from ", $least, " to ", $most);
                        errors.push(FieldError::new(concat!("/", stringify!($name)), detail));
                    }
                )+
                errors
            }

            /// As a column holds them. What this version does not know or cannot read has its
            /// default: a stored value must never shut a tenant out.
            pub fn from_column(stored: &Value) -> Self {
                Self { $($name: stored.get(stringify!($name)).and_then(Value::as_i64)),+ }
            }

            /// All limits: the changed ones and the defaults.
            pub fn effective(&self) -> Limits {
                let default = Limits::default();
                Limits {
                    $(
                        $name: self.$name
                            .and_then(|value| u32::try_from(value.clamp($least, $most)).ok())
                            .unwrap_or(default.$name)
                    ),+
                }
            }
        }
    };
}

/// Whether a tenant that has `count` of what `limit_name` limits may have one more.
pub fn check_room(limit_name: &str, count: i64, limit: u32) -> Result<()> {
    if count < i64::from(limit) {
        return Ok(());
    }
    let detail = format!(
        "the tenant has {count}, and its limit `{limit_name}` is {limit}: remove some, or ask the operator for more"
    );
    Err(Error::new(Code::LimitReached, detail))
}

/// Tells null from a member that is left out.
fn given<'de, D, T>(deserializer: D) -> std::result::Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer).map(Some)
}

// Defaults keep a runaway client from taking a node, and let a busy tenant work: an operator who sells
// less sets less.
limits! {
    /// API requests of the whole tenant.
    requests_per_minute, 1_200_000, 1, 10_000_000;
    /// API requests of one key.
    requests_per_minute_per_key, 1_200_000, 1, 10_000_000;
    /// API requests for one acting person.
    requests_per_minute_per_person, 60_000, 1, 1_000_000;
    /// Tokens of models, in and out.
    tokens_per_minute, 100_000_000, 1, 1_000_000_000;
    /// Turns that run at one time.
    concurrent_turns, 1_000, 1, 100_000;
    /// Calls of models outside of sessions that run at one time; each node gives its share.
    concurrent_calls, 1_000, 1, 100_000;
    /// Event streams and long polls that are open at one time.
    open_streams, 10_000, 1, 1_000_000;
    /// Identities seen for the first time; 0 admits nobody new.
    new_identities_per_hour, 1_000_000, 0, 10_000_000;
    /// API keys that were not revoked, expired ones included.
    api_keys, 1_000, 1, 100_000;
    /// Agents.
    agents, 500, 1, 10_000;
    /// Issuers of user tokens.
    issuers, 100, 0, 1_000;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_changed_has_its_default() {
        let overrides = LimitOverrides::from_column(&json!({"open_streams": 7, "of_a_newer": 1}));
        let expected = Limits {
            open_streams: 7,
            ..Limits::default()
        };
        assert_eq!(overrides.effective(), expected);
        assert_eq!(
            serde_json::to_value(&overrides).unwrap(),
            json!({"open_streams": 7})
        );
        for unreadable in [json!({}), json!({"open_streams": "x"}), json!(null)] {
            let overrides = LimitOverrides::from_column(&unreadable);
            assert_eq!(overrides.effective(), Limits::default());
        }
    }

    #[test]
    fn every_limit_out_of_range_is_pointed_at() {
        let overrides: LimitOverrides = serde_json::from_value(json!({
            "requests_per_minute": 0, "concurrent_turns": -1, "new_identities_per_hour": 0,
            "tokens_per_minute": 1_000_000_001
        }))
        .unwrap();
        let pointers: Vec<String> = overrides.errors().into_iter().map(|e| e.pointer).collect();
        assert_eq!(
            pointers,
            [
                "/requests_per_minute",
                "/tokens_per_minute",
                "/concurrent_turns"
            ]
        );
    }
}
