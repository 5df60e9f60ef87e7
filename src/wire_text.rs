//! Types that are text on the wire: parsed by their own rule (`FromStr`), documented by its pattern.

/// `wire_text!(Type, pattern, min_length, max_length)`: a body that breaks the rule is refused with a pointer to the
/// member, and the OpenAPI document states the rule. `Type as "Name"` names the schema otherwise than the type.
macro_rules! wire_text {
    ($name:ident $(as $schema_name:literal)?, $pattern:expr, $min:expr, $max:expr) => {
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }

        text_schema!($name $(as $schema_name)?, $pattern, $min, $max);
    };
}

/// The schema alone, for a type that is parsed in another way.
macro_rules! text_schema {
    ($name:ident $(as $schema_name:literal)?, $pattern:expr, $min:expr, $max:expr) => {
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::schema::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .pattern(Some($pattern))
                    .min_length(Some($min))
                    .max_length(Some($max))
                    .build()
                    .into()
            }
        }

        impl utoipa::ToSchema for $name {
            $(
                fn name() -> std::borrow::Cow<'static, str> {
                    std::borrow::Cow::Borrowed($schema_name)
                }
            )?
        }
    };
}
