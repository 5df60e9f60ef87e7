//! Enums that are one word each in the API, in columns and in the code.

/// `text_enum!(Name { Variant = "word", … })`: the word is the same in JSON, in a column and in `as_str`.
macro_rules! text_enum {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$variant_meta:meta])* $variant:ident = $word:literal),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$variant_meta])* $variant),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }

            /// What a column holds; its check constraint knows the same words.
            pub fn from_column(text: &str) -> $crate::error::Result<Self> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    other => Err($crate::error::Error::internal(anyhow::anyhow!(
                        concat!("a column holds no ", stringify!($name), ": {}"), other
                    ))),
                }
            }
        }
    };
}
pub(crate) use text_enum;

#[cfg(test)]
mod tests {
    use serde_json::json;

    text_enum!(Colour { Red = "red", LightBlue = "light_blue" });

    #[test]
    fn json_columns_and_code_have_the_same_words() {
        for colour in Colour::ALL.iter().copied() {
            assert_eq!(json!(colour), json!(colour.as_str()));
            assert_eq!(Colour::from_column(colour.as_str()).unwrap(), colour);
        }
        assert!(Colour::from_column("green").is_err());
    }
}
