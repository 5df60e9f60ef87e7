//! The OpenAPI document: collected from the handlers, then completed with everything that all operations share, so
//! that no handler has to repeat it.

use serde_json::{Map, Value, json};
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, OpenApi, OpenApiBuilder};
use utoipa::{PartialSchema, ToSchema};

use crate::domain::people::identity::IdentityName;
use crate::domain::values::paging::{DEFAULT_LIMIT, MAX_LIMIT};
use crate::error::FieldError;
use crate::http::request::idempotency_key;
use crate::http::response::problem::{Problem, Shape};

const DESCRIPTION: &str = "One assistant conversation across every platform, for many tenants at once.\n\n\
     Each operation states which credentials may call it (`security`: for API keys, one of the scopes is enough) and \
     for whom it acts (`x-acts-for`). An object of another tenant or user is 404, whether it exists or not. Errors \
     are `application/problem+json` with a stable `code`.";

/// Longer than any cursor that is given out.
const MAX_CURSOR: usize = 512;

/// The document before its paths.
pub fn skeleton() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Throughline")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(DESCRIPTION))
        .license(Some(
            utoipa::openapi::LicenseBuilder::new()
                .name("Apache-2.0")
                .identifier(Some("Apache-2.0"))
                .build(),
        ))
        .build();
    let components = ComponentsBuilder::new()
        .schema(Problem::name(), Problem::schema())
        .schema(FieldError::name(), FieldError::schema())
        .build();
    OpenApiBuilder::new()
        .info(info)
        .components(Some(components))
        .build()
}

/// The whole document, as it is committed and served.
pub fn finish(collected: &OpenApi) -> anyhow::Result<Value> {
    let mut document = serde_json::to_value(collected)?;
    document["components"]["securitySchemes"] = json!({
        "operator_key": {
            "type": "http", "scheme": "bearer",
            "description": "A key of THROUGHLINE_OPERATOR_KEY: the operator, who reads no tenant's content.",
        },
        "api_key": {
            "type": "http", "scheme": "bearer", "bearerFormat": "tl_…",
            "description": "A tenant's API key. The key needs one of the scopes that an operation names.",
        },
        "user_token": {
            "type": "http", "scheme": "bearer", "bearerFormat": "JWT",
            "description": "A JWT of an issuer that the tenant registered. It acts for the user it names, and no other. \
                            The tenant is the one whose id is in `aud`, or the one in the header `X-Throughline-Tenant`.",
        },
    });
    // The address that served the document.
    document["servers"] = json!([{"url": "/", "description": "This deployment"}]);
    refer_to_items(&mut document["components"]["schemas"]);
    for (path, item) in members(&mut document["paths"]) {
        let shape = Shape::of_path(&path);
        for (method, operation) in members(item) {
            if let Some(parameters) = operation.get_mut("parameters") {
                bound_pages(parameters);
                refuse_nul(parameters);
            }
            if operation.get("x-acts-for").is_none() {
                operation["x-acts-for"] = acts_for(&operation["security"]).into();
            }
            share(&method, shape, operation);
        }
    }
    Ok(document)
}

/// Says of each list what `paging` holds `limit` and `cursor` to. A list with other bounds says them itself.
fn bound_pages(parameters: &mut Value) {
    for parameter in parameters.as_array_mut().into_iter().flatten() {
        let bounds = match parameter["name"].as_str() {
            Some("limit") => json!({"minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}),
            Some("cursor") => json!({"maxLength": MAX_CURSOR, "pattern": "^[A-Za-z0-9_-]+$"}),
            Some(_) | None => continue,
        };
        let schema = &mut parameter["schema"];
        if schema.get("maximum").is_some() || schema.get("maxLength").is_some() {
            continue;
        }
        for (name, bound) in bounds.as_object().into_iter().flatten() {
            schema[name] = bound.clone();
        }
    }
}

/// For whom an operation acts by the credentials it takes, unless its handler says otherwise.
fn acts_for(security: &Value) -> &'static str {
    let rules = security.as_array().map_or(&[][..], Vec::as_slice);
    let takes = |scheme: &str| rules.iter().any(|rule| rule.get(scheme).is_some());
    match (takes("operator_key"), takes("api_key"), takes("user_token")) {
        (false, true, true) => "the named user, the token's user, or the tenant",
        (false, true, false) => "tenant",
        (false, false, true) => "the token's user",
        (true, _, _) | (false, false, false) => "nobody",
    }
}

/// States for each parameter that `extract` refuses U+0000. In bodies it is replaced.
fn refuse_nul(schema: &mut Value) {
    if schema.get("maxLength").is_some() && schema.get("pattern").is_none() {
        schema["pattern"] = json!(r"^[^\u0000]*$");
    }
    match schema {
        Value::Array(items) => items.iter_mut().for_each(refuse_nul),
        Value::Object(members) => members.values_mut().for_each(refuse_nul),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Lists refer to the schema of their items. The collected document repeats it, and generators would create a second
/// type.
fn refer_to_items(schemas: &mut Value) {
    for (name, schema) in members(schemas) {
        if let Some(item) = name.strip_prefix("ListResponse_") {
            let reference = format!("#/components/schemas/{item}");
            schema["properties"]["data"]["items"] = json!({ "$ref": reference });
        }
    }
}

/// The schema of an error.
fn error_content(shape: Shape) -> Value {
    match shape {
        Shape::Problem => {
            json!({"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}})
        }
        Shape::OpenAi => {
            let text = json!({"type": "string"});
            let error = json!({
                "type": "object", "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": text, "type": text, "param": {"type": ["string", "null"]}, "code": text,
                },
            });
            let schema = json!({
                "type": "object", "required": ["error"], "properties": {"error": error},
            });
            json!({"application/json": {"schema": schema}})
        }
    }
}

/// Adds the headers and refusals that follow from the kind of an operation.
fn share(method: &str, shape: Shape, operation: &mut Value) {
    let public = operation["security"] == json!([{}]);
    // Only the operator has no limits.
    let limited = operation["security"].as_array().is_some_and(|rules| {
        let has_limits = |rule: &Value| {
            ["api_key", "user_token"]
                .iter()
                .any(|s| rule.get(s).is_some())
        };
        rules.iter().any(has_limits)
    });
    let has_body = operation.get("requestBody").is_some();
    // An operation without a body marks itself.
    let retryable = operation.get("x-retryable").is_some();
    let creates = method == "post" && (has_body || retryable);
    let bridged = operation["security"][0]["api_key"]
        .as_array()
        .is_some_and(|scopes| scopes.contains(&json!("bridge")));
    let mut refusals = vec![
        (400, "Invalid request"),
        (414, "URI too long"),
        (500, "Internal server error"),
        (503, "Service temporarily unavailable"),
        (504, "Request timed out"),
    ];
    if !public {
        refusals.push((401, "Missing or invalid credential"));
        refusals.push((403, "Insufficient scope, or not allowed"));
        // Also where nothing is named: what is not a person's own is not there for their token.
        refusals.push((404, "Not found, or not visible to the caller"));
        // Also for the operator's: a key is counted before it is refused.
        refusals.push((429, "Rate limit exceeded"));
    }
    if has_body {
        refusals.push((408, "Request timeout"));
        refusals.push((413, "Payload too large"));
        refusals.push((
            415,
            "Unsupported media type: the body is not application/json",
        ));
        refusals.push((422, "Invalid value"));
    }
    if creates {
        let text = "The Idempotency-Key was used with another request, or the same was changed concurrently";
        refusals.push((409, text));
    } else if method != "get" && !public {
        refusals.push((409, "Concurrent change"));
    }
    if creates {
        push_parameter(operation, idempotency_key());
    }
    if bridged {
        push_parameter(operation, acting_identity());
    }
    let Some(responses) = operation["responses"].as_object_mut() else {
        return;
    };
    for (status, description) in refusals {
        responses.entry(status.to_string()).or_insert_with(|| {
            json!({
                "description": description,
                "content": error_content(shape),
            })
        });
    }
    for (status, response) in responses.iter_mut() {
        response["headers"]["X-Request-Id"] = header("Identifies this request in the logs");
        if creates && status.starts_with('2') {
            let text =
                "`true` if this is the answer to an earlier request with the same Idempotency-Key";
            response["headers"]["Idempotency-Replayed"] = header(text);
        }
        if limited && (status.starts_with('2') || status == "429") {
            response["headers"]["RateLimit-Policy"] =
                header("The caller's tightest limit: its quota `q` in a window of `w` seconds");
            response["headers"]["RateLimit"] =
                header("The rest of that limit, `r`, and the seconds until the window ends, `t`");
        }
        if status == "429" {
            response["headers"]["Retry-After"] = header("Seconds until the window ends");
        }
    }
}

fn header(description: &str) -> Value {
    json!({"description": description, "schema": {"type": "string"}})
}

fn idempotency_key() -> Value {
    json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "A repeated request with the same key within 24 hours gets the first answer, \
                        with `Idempotency-Replayed: true`. A secret in it is replayed for ten minutes.",
        "schema": {"type": "string", "minLength": 1, "maxLength": idempotency_key::MAX_KEY, "pattern": "^[!-~]+$"},
    })
}

fn acting_identity() -> Value {
    json!({
        "name": "X-Throughline-Identity", "in": "header", "required": false,
        "description": "The user that a bridge key acts for, `platform:external_id` or `platform@scope:external_id`, \
                        if the body does not name one. With a user token also `me`: the token's own user.",
        "schema": {"anyOf": [{"const": "me"}, IdentityName::schema()]},
    })
}

fn push_parameter(operation: &mut Value, parameter: Value) {
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(parameter),
        None => operation["parameters"] = json!([parameter]),
    }
}

fn members(value: &mut Value) -> impl Iterator<Item = (String, &mut Value)> {
    value
        .as_object_mut()
        .into_iter()
        .flat_map(Map::iter_mut)
        .map(|(name, member)| (name.clone(), member))
}

/// The committed form: readable, with a final line end.
pub fn to_text(document: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(document)? + "\n")
}
