//! The OpenAPI document: committed, served, readable without another host.

use crate::support::Fields;
use serde_json::Value;

use crate::support::servers::cluster::project;
use crate::support::{Reply, World};
use throughline::http;

#[test]
fn the_committed_document_is_the_generated_one() {
    let file = project().join("openapi/openapi.json");
    let committed = std::fs::read_to_string(file).unwrap_or_default();
    let generated = http::openapi::to_text(&http::document().unwrap()).unwrap();
    assert!(
        committed == generated,
        "openapi/openapi.json is not up to date: run `make openapi`"
    );
}

#[test]
fn it_is_openapi_3_1_and_every_operation_has_an_id_a_summary_and_a_tag() {
    let document = http::document().unwrap();
    assert!(document.text("openapi").starts_with("3.1"));
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            for member in ["operationId", "summary"] {
                assert!(
                    operation[member].is_string(),
                    "{method} {path} has no {member}"
                );
            }
            assert!(operation["tags"].is_array(), "{method} {path} has no tag");
        }
    }
}

#[test]
fn every_reference_in_it_leads_somewhere() {
    let document = http::document().unwrap();
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let pointer = &part[..part.find('"').unwrap()];
        assert!(document.pointer(pointer).is_some(), "{pointer} is missing");
    }
}

/// Every schema below `schema`, through references, with where it is.
fn schemas<'a>(document: &'a Value, schema: &'a Value, place: &str) -> Vec<(String, &'a Value)> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(&reference[1..]).unwrap();
        return schemas(document, target, place);
    }
    let mut found = vec![(place.to_owned(), schema)];
    let children = |member: &str| schema[member].as_object().into_iter().flatten();
    for (name, child) in children("properties") {
        found.extend(schemas(document, child, &format!("{place}/{name}")));
    }
    for member in ["items", "additionalProperties", "propertyNames"] {
        if schema[member].is_object() {
            let place = format!("{place}/{member}");
            found.extend(schemas(document, &schema[member], &place));
        }
    }
    for member in ["oneOf", "anyOf", "allOf"] {
        for child in schema[member].as_array().into_iter().flatten() {
            found.extend(schemas(document, child, place));
        }
    }
    found
}

#[test]
fn every_text_a_request_may_hold_has_its_rule_in_the_document() {
    let document = http::document().unwrap();
    let mut texts = 0;
    for item in document["paths"].as_object().unwrap().values() {
        for operation in item.as_object().unwrap().values() {
            let name = operation.text("operationId");
            let body = &operation["requestBody"]["content"]["application/json"]["schema"];
            let mut found = schemas(&document, body, name);
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let place = format!("{name}?{}", parameter.text("name"));
                found.extend(schemas(&document, &parameter["schema"], &place));
            }
            for (place, schema) in found {
                let kind = &schema["type"];
                let is_text = kind == "string"
                    || kind
                        .as_array()
                        .is_some_and(|all| all.contains(&"string".into()));
                let has_rule = ["pattern", "maxLength", "enum", "const", "format"]
                    .iter()
                    .any(|rule| schema.get(rule).is_some());
                assert!(!is_text || has_rule, "{place} may hold any text");
                texts += usize::from(is_text);
            }
        }
    }
    assert!(texts >= 30, "the walk saw only {texts} texts");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_and_its_reader_are_served_from_the_binary() {
    let world = World::new().await;
    let get = async |path: &str| Reply::of(reqwest::Client::new().get(world.url(path))).await;
    assert_eq!(
        get("/openapi.json").await.expect(200),
        http::document().unwrap()
    );
    let page = get("/docs").await;
    assert_eq!(page.status, 200);
    for text in [&page.body, &get("/docs/swagger-initializer.js").await.body] {
        assert!(
            !text.contains("http://") && !text.contains("https://"),
            "{text}"
        );
    }
    for file in ["swagger-ui.css", "swagger-ui-bundle.js", "index.css"] {
        assert!(page.body.contains(file), "{file}");
        assert_eq!(get(&format!("/docs/{file}")).await.status, 200, "{file}");
    }
    assert!(
        page.header("content-security-policy")
            .contains("default-src 'self'")
    );
    get("/docs/nothing").await.expect_problem(404, "not_found");
}

#[test]
fn every_operation_that_wants_a_credential_documents_how_it_refuses_one() {
    let document = http::document().unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if operation["security"] == serde_json::json!([{}]) {
                continue;
            }
            for status in ["401", "403", "404", "429"] {
                assert!(
                    operation["responses"][status].is_object(),
                    "{method} {path} lacks {status}"
                );
            }
            let operators = operation["security"][0].get("operator_key").is_some();
            let told = operation["responses"]["429"]["headers"]["RateLimit"].is_object();
            assert_eq!(told, !operators, "{method} {path}");
        }
    }
}

#[test]
fn generators_get_one_type_of_each_thing() {
    let document = http::document().unwrap();
    assert!(document["servers"][0]["url"].is_string());
    let text = document.to_string();
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let used = text.contains(&format!("\"#/components/schemas/{name}\""));
        assert!(used, "nothing refers to {name}");
        if name.starts_with("ListResponse_") {
            let items = &schema["properties"]["data"]["items"];
            assert!(items["$ref"].is_string(), "{name} repeats its items");
        }
    }
}

#[test]
fn what_chat_answers_is_in_the_document() {
    let document = http::document().unwrap();
    let answer = &document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"];
    for header in [
        "X-Hermes-Session-Id",
        "X-Hermes-Session-Key",
        "X-Throughline-Conversation-Id",
        "X-Throughline-Turn-Id",
        "X-Throughline-Stateless",
        "Idempotency-Replayed",
    ] {
        assert!(answer["headers"][header].is_object(), "{header}");
    }
    let body = &answer["content"]["application/json"]["schema"];
    let places: Vec<String> = schemas(&document, body, "")
        .into_iter()
        .map(|(place, _)| place)
        .collect();
    for place in [
        "/choices/items/message/reasoning_content",
        "/choices/items/logprobs",
        "/usage/prompt_tokens_details",
        "/hermes/turn_id",
    ] {
        assert!(places.iter().any(|one| one == place), "{place}: {places:?}");
    }
}

#[test]
fn what_can_be_repeated_says_how_a_repeated_answer_is_known() {
    let document = http::document().unwrap();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let mut names = parameters.map(|parameter| &parameter["name"]);
            if !names.any(|name| name == "Idempotency-Key") {
                continue;
            }
            for (status, response) in operation["responses"].as_object().unwrap() {
                let told = response["headers"]["Idempotency-Replayed"].is_object();
                assert!(told || !status.starts_with('2'), "{method} {path} {status}");
            }
        }
    }
}
