//! Exports and imports, and what is equal in them.

use serde_json::{Value, json};

use crate::support::{Fields, World};

pub async fn exported(world: &World, key: &str, id: &str) -> Value {
    world
        .get(key, &format!("/v1/sessions/{id}/export"))
        .await
        .expect(200)
}

pub async fn imported(world: &World, key: &str, document: &Value) -> Value {
    world
        .post(key, "/v1/sessions/import", document.clone())
        .await
        .expect(201)
}

/// What an import keeps of a document.
pub fn lasting(document: &Value) -> Value {
    let mut document = document.clone();
    let remove = |object: &mut Value, members: &[&str]| {
        let object = object.as_object_mut().unwrap();
        members.iter().for_each(|member| {
            object.remove(*member);
        });
    };
    let of_document = ["exported_at", "conversation_id", "created_at", "signature"];
    remove(&mut document, &of_document);
    for link in document["links"].as_array_mut().unwrap() {
        remove(link, &["id", "created_at"]);
        for message in link["messages"].as_array_mut().unwrap() {
            remove(message, &["identity", "platform", "created_at"]);
        }
    }
    document
}

/// Every original message of a document, in order.
pub fn originals(document: &Value) -> Vec<&Value> {
    let links = document.items("links").iter();
    let messages = links.flat_map(|link| link.items("messages"));
    messages
        .filter(|message| message.get("role").is_some())
        .collect()
}

pub fn weather() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "What is \"this\"?\n"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": 0.5}, "z": null},
        ]},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "type": "function", "index": 0,
             "function": {"name": "look", "arguments": "{\"at\": \"a\"}", "strict": true}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cloud"},
        {"role": "assistant", "content": "A cloud. ☁", "token_count": 17},
        {"role": "user", "content": "Thanks"},
    ])
}

/// Reads on to the end, or to where it breaks off.
pub async fn finish(mut response: reqwest::Response, mut text: Vec<u8>) -> Result<Value, Vec<u8>> {
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => return Ok(serde_json::from_slice(&text).unwrap()),
            Err(_) => return Err(text),
        }
    }
}
