//! Examines a JSON text before any type parses it: its validity, its cost in memory, and a canonical form that
//! is equal for equal JSON. Builds no values itself.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::crypto;

/// Each value costs memory, even if its text is short.
const MAX_VALUES: usize = 500_000;
/// A value's slot in a list with twice the capacity, and the overhead of its text.
const VALUE_BYTES: usize = 72;
/// A map node has capacity for eleven members, and the nodes of a large map are half full.
const MAP_NODE_BYTES: usize = 640;
const MEMBERS_IN_NODE: usize = 6;
/// serde_json reserves member names with this prefix: it parses the value as JSON text in place, without any
/// limit of depth and size.
const RESERVED: &str = "$serde_json::private::";
/// A shorter text is cheap, whatever it contains.
const SHORT: usize = 4096;

/// The cost and the hash of a text.
#[derive(Debug)]
pub struct Measurement {
    /// The approximate bytes in memory, as values of any type.
    pub cost: usize,
    /// The hash of the canonical form, if requested.
    pub hash: Option<[u8; 32]>,
}

#[derive(Debug)]
pub enum JsonError {
    TooManyValues,
    /// A member has a name that the JSON library reserves.
    ReservedName,
    Malformed(serde_json::Error),
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyValues => write!(f, "a body has at most {MAX_VALUES} values"),
            Self::ReservedName => write!(f, "a member's name begins with {RESERVED}"),
            Self::Malformed(error) => error.fmt(f),
        }
    }
}

/// Parses the whole text, so that the check includes numbers and nesting that no type reads.
pub fn measure(text: &str, hashed: bool) -> Result<Measurement, JsonError> {
    let walk = RefCell::new(Walk {
        values: 0,
        has_reserved_name: false,
        cost: text.len(),
        canonical: hashed.then(Vec::new),
    });
    let mut json = serde_json::Deserializer::from_str(text);
    let read = AnyValue(&walk)
        .deserialize(&mut json)
        .and_then(|()| json.end());
    let walk = walk.into_inner();
    if walk.values > MAX_VALUES {
        return Err(JsonError::TooManyValues);
    }
    if walk.has_reserved_name {
        return Err(JsonError::ReservedName);
    }
    read.map_err(JsonError::Malformed)?;
    Ok(Measurement {
        cost: walk.cost,
        hash: walk.canonical.map(|canonical| crypto::sha256(&canonical)),
    })
}

/// Parses an untrusted value, if the text is valid and costs at most `max_cost`.
pub fn read_value(text: &str, max_cost: usize) -> Option<Value> {
    let is_plain = || !text.contains("\\u") && !text.contains(RESERVED);
    if text.len() > SHORT || !is_plain() {
        let measured = measure(text, false).ok()?;
        if measured.cost > max_cost {
            return None;
        }
    }
    serde_json::from_str(text).ok()
}

struct Walk {
    values: usize,
    has_reserved_name: bool,
    cost: usize,
    /// The output of `serde_json::Value`: members sorted by name, without duplicates.
    canonical: Option<Vec<u8>>,
}

impl Walk {
    fn count_value<E: Error>(&mut self) -> Result<(), E> {
        self.values += 1;
        self.cost += VALUE_BYTES;
        if self.values > MAX_VALUES {
            return Err(E::custom("too many values"));
        }
        Ok(())
    }

    fn write(&mut self, json: &[u8]) {
        if let Some(canonical) = &mut self.canonical {
            canonical.extend_from_slice(json);
        }
    }

    fn write_value<E: Error>(&mut self, value: impl serde::Serialize) -> Result<(), E> {
        match &mut self.canonical {
            Some(canonical) => serde_json::to_writer(canonical, &value).map_err(E::custom),
            None => Ok(()),
        }
    }

    fn position(&self) -> usize {
        self.canonical.as_ref().map_or(0, Vec::len)
    }

    /// Sorts the members that were written since `start` by name. The last of duplicate members wins.
    fn order_members(&mut self, start: usize, mut members: Vec<(String, Range<usize>)>) {
        let Some(canonical) = &mut self.canonical else {
            return;
        };
        members.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut ordered = Vec::with_capacity(canonical.len() - start);
        for (index, (name, range)) in members.iter().enumerate() {
            let next = members.get(index + 1);
            if next.is_some_and(|(next, _)| next == name) {
                continue;
            }
            if !ordered.is_empty() {
                ordered.push(b',');
            }
            ordered.extend_from_slice(&canonical[range.clone()]);
        }
        canonical.truncate(start);
        canonical.extend_from_slice(&ordered);
    }
}

/// Visits any value.
struct AnyValue<'a>(&'a RefCell<Walk>);

impl<'de> DeserializeSeed<'de> for AnyValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

macro_rules! visit_simple {
    ($($method:ident($kind:ty);)+) => {$(
        fn $method<E: Error>(self, value: $kind) -> Result<(), E> {
            let mut walk = self.0.borrow_mut();
            walk.count_value()?;
            walk.write_value(value)
        }
    )+};
}

impl<'de> Visitor<'de> for AnyValue<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    visit_simple! {
        visit_bool(bool); visit_i64(i64); visit_u64(u64); visit_f64(f64); visit_str(&str);
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        let mut walk = self.0.borrow_mut();
        walk.count_value()?;
        walk.write(b"null");
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.borrow_mut().count_value()?;
        self.0.borrow_mut().write(b"[");
        let mut is_first = true;
        loop {
            let before = self.0.borrow().position();
            if !is_first {
                self.0.borrow_mut().write(b",");
            }
            if items.next_element_seed(AnyValue(self.0))?.is_none() {
                let mut walk = self.0.borrow_mut();
                if let Some(canonical) = &mut walk.canonical {
                    canonical.truncate(before);
                }
                walk.write(b"]");
                return Ok(());
            }
            is_first = false;
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.0.borrow_mut().count_value()?;
        self.0.borrow_mut().write(b"{");
        let start = self.0.borrow().position();
        let mut members = Vec::new();
        let mut count = 0_usize;
        loop {
            let before = self.0.borrow().position();
            let Some(name) = map.next_key_seed(Name(self.0))? else {
                break;
            };
            map.next_value_seed(AnyValue(self.0))?;
            count += 1;
            if let Some(name) = name {
                members.push((name, before..self.0.borrow().position()));
            }
        }
        let mut walk = self.0.borrow_mut();
        // A map without members has no node, but the type that parses it may be a struct of some size.
        walk.cost += MAP_NODE_BYTES * count.div_ceil(MEMBERS_IN_NODE).max(1);
        walk.order_members(start, members);
        walk.write(b"}");
        Ok(())
    }
}

/// The name of a member, returned only if the canonical form is requested.
struct Name<'a>(&'a RefCell<Walk>);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a member")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        let mut walk = self.0.borrow_mut();
        if name.starts_with(RESERVED) {
            walk.has_reserved_name = true;
            return Err(E::custom("a reserved name"));
        }
        if walk.canonical.is_none() {
            return Ok(None);
        }
        walk.write_value(name)?;
        walk.write(b":");
        Ok(Some(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn hash(text: &str) -> [u8; 32] {
        measure(text, true).unwrap().hash.unwrap()
    }

    /// The hash of nodes from before this module. Responses that they stored are looked up by it.
    fn hash_of_value(text: &str) -> [u8; 32] {
        let value: Value = serde_json::from_str(text).unwrap();
        crypto::sha256(&serde_json::to_vec(&value).unwrap())
    }

    #[test]
    fn the_canonical_form_is_that_of_a_value() {
        for text in [
            "null",
            " [ ] ",
            "{}",
            r#"{"b":1,"a":[true,null,-0,1.50,1e2,18446744073709551615,-9223372036854775808]}"#,
            r#"{"a":1,"b":{"d":[],"c":{}},"a":[2,{"a":1,"a":2}]}"#,
            r#"{"é":"\u00e9\n\"","\"":1,"!":2,"~":3,"\\":4}"#,
            r#"[[[1],[]],{"":{"":""}}]"#,
        ] {
            assert_eq!(hash(text), hash_of_value(text), "{text}");
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(json!(null)),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "\\PC{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map("\\PC{0,3}", inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_text_has_the_hash_of_its_value(value in any_json()) {
            let text = serde_json::to_string_pretty(&value).unwrap();
            prop_assert_eq!(hash(&text), hash_of_value(&text));
        }
    }

    #[test]
    fn a_short_text_that_is_large_in_memory_has_a_high_cost() {
        let cost = |text: &str| measure(text, false).unwrap().cost;
        let maps = format!("[{}0]", r#"{"a":0},"#.repeat(10_000));
        assert!(cost(&maps) > 7_000_000, "{}", cost(&maps));
        let text = format!("[\"{}\"]", "x".repeat(100_000));
        assert!(cost(&text) < 110_000);
        let members: Vec<String> = (0..600).map(|n| format!("\"m{n}\":0")).collect();
        assert!(cost(&format!("{{{}}}", members.join(","))) > 100 * MAP_NODE_BYTES);
    }

    #[test]
    fn a_reserved_name_is_refused_in_every_spelling() {
        for name in [
            "$serde_json::private::RawValue",
            r"\u0024serde_json::private::Number",
        ] {
            let text = format!(r#"[{{"a": {{"b": 1, "{name}": "[1]"}}}}]"#);
            assert!(matches!(measure(&text, true), Err(JsonError::ReservedName)));
            assert_eq!(read_value(&text, usize::MAX), None);
        }
        let maps = format!("[{}0]", r#"{"a":0},"#.repeat(10_000));
        assert_eq!(read_value(&maps, 1_000_000), None);
        assert!(read_value(&maps, 10_000_000).is_some());
        assert_eq!(
            read_value(r#"{"a": "\u00e9"}"#, 4096),
            Some(json!({"a": "é"}))
        );
    }

    #[test]
    fn malformed_json_is_found_at_any_depth() {
        for text in [
            "",
            "{",
            "[1e999]",
            "{} x",
            "[01]",
            r#"["\x"]"#,
            r#"{"a":1,}"#,
        ] {
            let result = measure(text, true);
            assert!(matches!(result, Err(JsonError::Malformed(_))), "{text}");
        }
        let deep = "[".repeat(10_000);
        assert!(matches!(
            measure(&deep, false),
            Err(JsonError::Malformed(_))
        ));
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        assert!(matches!(
            measure(&many, false),
            Err(JsonError::TooManyValues)
        ));
    }
}
