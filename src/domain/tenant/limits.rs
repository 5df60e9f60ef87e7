//! The limits of a tenant. An operator overrides single limits; the rest keep their defaults.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::error::{Code, Error, FieldError, Result};

/// A limit of tenants.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    pub name: &'static str,
    pub default: u32,
    pub min: u32,
    pub max: u32,
    pub unit: &'static str,
    pub meaning: &'static str,
}

macro_rules! limits {
    ($(#[doc = $doc:literal] $name:ident, $default:tt, $min:tt, $max:tt, $unit:literal;)+) => {
        /// The limits that apply to a tenant.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
        pub struct Limits { $(#[doc = $doc] pub $name: u32),+ }

        /// Every limit, in the order of the reference.
        pub const ALL: &[Limit] = &[$(Limit {
            name: stringify!($name),
            default: $default,
            min: $min,
            max: $max,
            unit: $unit,
            meaning: $doc,
        }),+];

        impl Default for Limits {
            fn default() -> Self {
                Self { $($name: $default),+ }
            }
        }

        /// The limits that an operator overrides. Wide numbers, so that a value out of range is reported as such.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitOverrides {
            $(
                #[doc = $doc]
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schema(minimum = $min, maximum = $max)]
                pub $name: Option<i64>
            ),+
        }

        /// Changes of single limits. Null restores the default; a missing member stays as it is.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, utoipa::ToSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitChanges {
            $(
                #[doc = $doc]
                #[serde(deserialize_with = "nullable")]
                #[schema(minimum = $min, maximum = $max, value_type = Option<i64>)]
                pub $name: Option<Option<i64>>
            ),+
        }

        impl LimitChanges {
            /// The limits that get a new value.
            pub fn overrides(&self) -> LimitOverrides {
                LimitOverrides { $($name: self.$name.flatten()),+ }
            }

            /// The names of the limits that get their default again.
            pub fn reset_names(&self) -> Vec<&'static str> {
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
            /// The values out of range, with pointers.
            pub fn errors(&self) -> Vec<FieldError> {
                let mut errors = Vec::new();
                $(
                    if self.$name.is_some_and(|value| !($min..=$max).contains(&value)) {
                        let detail = concat!("must be from ", $min, " to ", $max);
                        errors.push(FieldError::new(concat!("/", stringify!($name)), detail));
                    }
                )+
                errors
            }

            /// Reads a column. A limit that this version cannot read gets its default: a stored
            /// value must never lock a tenant out.
            pub fn from_column(stored: &Value) -> Self {
                Self { $($name: stored.get(stringify!($name)).and_then(Value::as_i64)),+ }
            }

            /// All limits: the overridden ones and the defaults.
            pub fn effective(&self) -> Limits {
                let default = Limits::default();
                Limits {
                    $(
                        $name: self.$name
                            .and_then(|value| u32::try_from(value.clamp($min, $max)).ok())
                            .unwrap_or(default.$name)
                    ),+
                }
            }
        }
    };
}

/// Refuses one more object of a kind of which the tenant has `count` and `limit_name` allows `limit`.
pub fn check_room(limit_name: &str, count: i64, limit: u32) -> Result<()> {
    if count < i64::from(limit) {
        return Ok(());
    }
    let detail = format!(
        "the tenant has {count}, and its limit `{limit_name}` is {limit}: remove some, or ask the operator for more"
    );
    Err(Error::new(Code::LimitReached, detail))
}

/// Distinguishes null from a missing member.
fn nullable<'de, D, T>(deserializer: D) -> std::result::Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer).map(Some)
}

// Defaults keep a runaway client from taking over a node, and let a busy tenant work. An operator who
// sells less sets less.
limits! {
    /// API requests of the whole tenant.
    requests_per_minute, 1_200_000, 1, 10_000_000, "a minute";
    /// API requests of one key.
    requests_per_minute_per_key, 1_200_000, 1, 10_000_000, "a minute";
    /// API requests for one acting user.
    requests_per_minute_per_person, 60_000, 1, 1_000_000, "a minute";
    /// Tokens of models, in and out.
    tokens_per_minute, 100_000_000, 1, 1_000_000_000, "a minute";
    /// Turns that run at one time.
    concurrent_turns, 1_000, 1, 100_000, "at one time";
    /// Model calls outside of sessions that run at one time. Each node admits its share.
    concurrent_calls, 1_000, 1, 100_000, "at one time";
    /// Event streams and long polls that are open at one time.
    open_streams, 10_000, 1, 1_000_000, "at one time";
    /// Identities seen for the first time. 0 admits no new identity.
    new_identities_per_hour, 1_000_000, 0, 10_000_000, "an hour";
    /// API keys that are not revoked, expired ones included.
    api_keys, 1_000, 1, 100_000, "in total";
    /// Agents.
    agents, 500, 1, 10_000, "in total";
    /// Issuers of user tokens.
    issuers, 100, 0, 1_000, "in total";
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_limit_without_an_override_has_its_default() {
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
    fn every_limit_out_of_range_has_a_pointer() {
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
