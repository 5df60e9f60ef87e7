//! How a type that is text on the wire is documented: by the rule that its parser holds.

/// `text_schema!(Type, pattern, min_length, max_length)`
macro_rules! text_schema {
    ($name:ident, $pattern:expr, $min:expr, $max:expr) => {
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

        impl utoipa::ToSchema for $name {}
    };
}
