//! Members of a JSON object that are forwarded unchanged: accessible by name, without parsing their values.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawMembers(BTreeMap<String, Box<RawValue>>);

impl RawMembers {
    /// The text of a member; `None` if it is null.
    pub fn get(&self, name: &str) -> Option<&str> {
        let text = self.0.get(name)?.get();
        (text != "null").then_some(text)
    }

    /// Parses a member as `T`; `None` if it has another type.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_str(self.get(name)?).ok()
    }

    pub fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some("true")
    }

    pub fn remove(&mut self, name: &str) -> Option<Box<RawValue>> {
        self.0.remove(name)
    }

    pub fn insert_true(&mut self, name: &str) {
        self.0.insert(name.to_owned(), RawValue::TRUE.to_owned());
    }

    /// All members but the named ones.
    pub fn without<'a>(
        &'a self,
        names: &'a [&str],
    ) -> impl Iterator<Item = (&'a str, &'a RawValue)> {
        let members = self.0.iter().map(|(name, text)| (name.as_str(), &**text));
        members.filter(|(name, _)| !names.contains(name))
    }

    /// The size of all names and texts.
    pub fn bytes(&self) -> usize {
        let members = self.0.iter();
        members
            .map(|(name, text)| name.len() + text.get().len())
            .sum()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> FromIterator<(&'a str, &'a RawValue)> for RawMembers {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a RawValue)>>(members: I) -> Self {
        let owned = |(name, text): (&str, &RawValue)| (name.to_owned(), text.to_owned());
        Self(members.into_iter().map(owned).collect())
    }
}

impl PartialEq for RawMembers {
    fn eq(&self, other: &Self) -> bool {
        let texts = |members: &Self| -> Vec<(String, String)> {
            let members = members.0.iter();
            members
                .map(|(name, text)| (name.clone(), text.get().to_owned()))
                .collect()
        };
        texts(self) == texts(other)
    }
}
