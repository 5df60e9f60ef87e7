//! A client's document as an untyped tree, in JSON or YAML: parsed whole before validation, so that one
//! response can report every error. It never grows past its size budget, however its bytes expand.

use std::cell::Cell;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::domain::values::outside_text::normalise_text;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tree {
    Null,
    Bool,
    /// The number's text, close to the original: no code computes with it.
    Number(String),
    Text(String),
    List(Vec<Tree>),
    /// In the order of the document; a duplicate member is there twice.
    Map(Vec<(String, Tree)>),
}

impl Tree {
    /// The kind of the value, for error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }
}

/// The maximum cost of a document: each value has a fixed cost, and each byte of text costs one more.
pub const MAX_COST: usize = 16 * 1024 * 1024;
const VALUE_COST: usize = 32;

/// The remaining cost of a document.
pub struct SizeBudget(Cell<usize>);

impl Default for SizeBudget {
    fn default() -> Self {
        Self(Cell::new(MAX_COST))
    }
}

impl SizeBudget {
    fn charge<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.0.get().checked_sub(bytes.saturating_add(VALUE_COST));
        self.0
            .set(left.ok_or_else(|| E::custom("the conversation is too large"))?);
        Ok(())
    }
}

/// Parses a tree, and charges all of it to a budget.
pub struct TreeSeed<'a>(pub &'a SizeBudget);

impl<'de> DeserializeSeed<'de> for TreeSeed<'_> {
    type Value = Tree;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Tree, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// The name of a member. In YAML, `5:` is one too.
struct MemberName(String);

impl<'de> Deserialize<'de> for MemberName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

macro_rules! visit_numbers {
    ($($method:ident($kind:ty);)+) => {$(
        fn $method<E: Error>(self, number: $kind) -> Result<Tree, E> {
            self.0.charge(0)?;
            Ok(Tree::Number(number.to_string()))
        }
    )+};
}

impl<'de> Visitor<'de> for TreeSeed<'_> {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    visit_numbers! {
        visit_i64(i64); visit_i128(i128); visit_u64(u64); visit_u128(u128); visit_f64(f64);
    }

    fn visit_unit<E: Error>(self) -> Result<Tree, E> {
        self.0.charge(0)?;
        Ok(Tree::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Tree, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Tree, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Tree, E> {
        self.0.charge(0)?;
        Ok(Tree::Bool)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Tree, E> {
        self.0.charge(text.len())?;
        Ok(Tree::Text(normalise_text(text).into_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        self.0.charge(0)?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(TreeSeed(self.0))? {
            list.push(item);
        }
        Ok(Tree::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Tree, A::Error> {
        self.0.charge(0)?;
        let mut map = Vec::new();
        while let Some(MemberName(name)) = members.next_key()? {
            self.0.charge(name.len())?;
            let name = normalise_text(&name).into_owned();
            map.push((name, members.next_value_seed(TreeSeed(self.0))?));
        }
        Ok(Tree::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, left: usize) -> Result<Tree, serde_json::Error> {
        let budget = SizeBudget(Cell::new(left));
        TreeSeed(&budget).deserialize(&mut serde_json::Deserializer::from_str(text))
    }

    #[test]
    fn a_tree_keeps_the_order_and_duplicates_of_the_document() {
        let text = |text: &str| Tree::Text(text.to_owned());
        let tree = read(r#"{"b": [null, true, 1.5], "a": "x", "b": {}}"#, MAX_COST).unwrap();
        let list = vec![Tree::Null, Tree::Bool, Tree::Number("1.5".to_owned())];
        let expected = [
            ("b", Tree::List(list)),
            ("a", text("x")),
            ("b", Tree::Map(Vec::new())),
        ];
        let expected = expected.map(|(name, tree)| (name.to_owned(), tree));
        assert_eq!(tree, Tree::Map(expected.to_vec()));
    }

    #[test]
    fn a_document_over_its_size_budget_is_refused() {
        assert!(read(r#"["abcd"]"#, 2 * VALUE_COST + 4).is_ok());
        assert!(read(r#"["abcd"]"#, 2 * VALUE_COST + 3).is_err());
        assert!(read(r#"{"abcd": 1}"#, 3 * VALUE_COST + 3).is_err());
    }
}
