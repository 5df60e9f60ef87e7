//! Malformed, mistyped, too large, too deep: a clear refusal, never a 500, and nothing is made.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use reqwest::Method;

use crate::support::{Fields, Reply, World};

async fn post_raw(world: &World, key: &str, content_type: &str, body: Vec<u8>) -> Reply {
    let request = world
        .request(Method::POST, "/v1/api-keys", key)
        .header("content-type", content_type)
        .body(body);
    Reply::of(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_not_the_documented_json_are_refused_with_a_pointer() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    let many = format!(
        "{{{}}}",
        (0..50_000)
            .map(|n| format!("\"k{n}\":0"))
            .collect::<Vec<_>>()
            .join(",")
    );
    for (name, body, status, code) in [
        ("empty", b"".to_vec(), 400, "invalid_json"),
        ("broken", b"{\"name\":".to_vec(), 400, "invalid_json"),
        ("two values", b"{} {}".to_vec(), 400, "invalid_json"),
        (
            "bad UTF-8",
            b"{\"name\": \"\xc3\x28\", \"scopes\": [\"chat\"]}".to_vec(),
            400,
            "invalid_json",
        ),
        ("deep nesting", deep, 400, "invalid_json"),
        (
            "a million keys or so",
            many.into_bytes(),
            400,
            "invalid_request",
        ),
        ("a list", b"[]".to_vec(), 400, "invalid_request"),
        ("null", b"null".to_vec(), 400, "invalid_request"),
        (
            "mistyped",
            br#"{"name": 5, "scopes": ["chat"]}"#.to_vec(),
            400,
            "invalid_request",
        ),
        (
            "missing",
            br#"{"name": "x"}"#.to_vec(),
            400,
            "invalid_request",
        ),
        (
            "bad time",
            br#"{"name": "x", "scopes": ["chat"], "expires_at": "soon"}"#.to_vec(),
            400,
            "invalid_request",
        ),
        (
            "huge number",
            br#"{"name": 1e999, "scopes": ["chat"]}"#.to_vec(),
            400,
            "invalid_json",
        ),
        (
            "raw NUL",
            b"{\"name\": \"a\0\", \"scopes\": [\"chat\"]}".to_vec(),
            400,
            "invalid_json",
        ),
    ] {
        let reply = post_raw(&world, &tenant.key, "application/json", body).await;
        assert_eq!(reply.status, status, "{name}: {}", reply.body);
        reply.expect_problem(status, code);
    }
    let keys = world.get(&tenant.key, "/v1/api-keys").await.expect(200);
    assert_eq!(keys.list().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_413_announced_or_not() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    let large = vec![b' '; 1024 * 1024 + 1];
    let announced = post_raw(&world, &tenant.key, "application/json", large.clone()).await;
    announced.expect_problem(413, "payload_too_large");
    let chunks = large
        .chunks(64 * 1024)
        .map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec()));
    let stream = futures_util::stream::iter(chunks.collect::<Vec<_>>());
    let request = world
        .request(Method::POST, "/v1/api-keys", &tenant.key)
        .header("content-type", "application/json")
        .body(reqwest::Body::wrap_stream(stream));
    Reply::of(request)
        .await
        .expect_problem(413, "payload_too_large");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_json_by_its_type_is_415() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for content_type in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "x",
    ] {
        let reply = post_raw(&world, &tenant.key, content_type, b"{}".to_vec()).await;
        reply.expect_problem(415, "unsupported_media_type");
    }
    let body = br#"{"name": "x", "scopes": ["chat"]}"#.to_vec();
    let reply = post_raw(&world, &tenant.key, "Application/JSON; charset=utf-8", body).await;
    reply.expect(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_credential_is_checked_before_the_body() {
    let world = World::new().await;
    let reply = post_raw(&world, "tl_wrong", "text/plain", b"{".to_vec()).await;
    reply.expect_problem(401, "unauthorized");
    let tenant = world.tenant("Acme").await;
    let (_, reader) = world.api_key(&tenant, "read").await;
    let reply = post_raw(&world, &reader, "application/json", b"{".to_vec()).await;
    reply.expect_problem(403, "missing_scope");
}

#[tokio::test(flavor = "multi_thread")]
async fn strange_paths_queries_and_methods_have_clear_answers() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    for path in [
        "/",
        "/v1",
        "/v1/nothing",
        "/v1/tenant/",
        "/v1//tenant",
        "/%00",
        "/v1/%ff",
        "/docs/../x",
    ] {
        let reply = world.get(&tenant.key, path).await;
        reply.expect_problem(404, "not_found");
    }
    let long = format!("/v1/tenant?x={}", "a".repeat(9000));
    world
        .get(&tenant.key, &long)
        .await
        .expect_problem(414, "uri_too_long");
    for (method, path, allow) in [
        (Method::PUT, "/v1/tenant", "GET, HEAD, PATCH"),
        (Method::PATCH, "/v1/api-keys", "GET, HEAD, POST"),
        (Method::GET, "/v1/api-keys/key_x", "DELETE"),
        (Method::POST, "/healthz", "GET, HEAD"),
        (Method::DELETE, "/openapi.json", "GET, HEAD"),
        (Method::TRACE, "/v1/tenant", "GET, HEAD, PATCH"),
    ] {
        let reply = Reply::of(world.request(method, path, &tenant.key)).await;
        reply.expect_problem(405, "method_not_allowed");
        assert_eq!(reply.header("allow"), allow);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_compatible_paths_have_openais_error_shape_with_the_same_codes() {
    let world = World::new().await;
    let reply = world.get("tl_wrong", "/v1/chat/nothing").await;
    let body = reply.expect(404);
    assert_eq!(body["error"]["code"], "not_found");
    assert_eq!(body["error"]["type"], "not_found_error");
    assert!(body["error"]["message"].is_string());
    assert!(body["error"]["param"].is_null());
    assert_eq!(reply.header("content-type"), "application/json");
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_http_does_not_hurt_the_node() {
    let world = World::new().await;
    let address = world.nodes[0].address;
    for nonsense in [
        b"GET / HTTP/9.9\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00".to_vec(),
        b"POST /v1/api-keys HTTP/1.1\r\nContent-Length: -1\r\n\r\n".to_vec(),
        [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'a'; 300_000]].concat(),
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let _ = stream.write_all(&nonsense);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 4"), "{text}");
    }
    Reply::of(reqwest::Client::new().get(world.url("/healthz")))
        .await
        .expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_the_json_library_s_own_is_refused_wherever_it_is() {
    let world = World::new().await;
    let tenant = world.tenant("Acme").await;
    // Each level is read anew where it stands, past every bound: enough of them ended the process.
    let mut text = "1".to_owned();
    for _ in 0..500 {
        let inner = serde_json::to_string(&text.replace('"', r"\u0022")).unwrap();
        let inner = inner.replace(r"\\u0022", r"\u005cu0022");
        text = format!(r#"[{{"$serde_json::private::RawValue":{inner}}}]"#);
        if text.len() > 200_000 {
            break;
        }
    }
    let said = r#"[{"role":"user","content":"hi"}]"#;
    for (path, body) in [
        (
            "/v1/chat/completions",
            format!(r#"{{"model":"main","messages":{said},"metadata":{text}}}"#),
        ),
        (
            "/v1/inbound",
            format!(r#"{{"identity":"telegram:1","text":"hi","attachments":{text}}}"#),
        ),
        (
            "/v1/sessions",
            format!(r#"{{"messages":[{{"role":"user","content":{text}}}]}}"#),
        ),
        (
            "/v1/sessions",
            r#"{"messages":[{"role":"user","content":[{"type":"text","text":"x","\u0024serde_json::private::RawValue":"y"}]}]}"#
                .to_owned(),
        ),
    ] {
        let request = world.request(Method::POST, path, &tenant.key);
        let request = request.header("content-type", "application/json").body(body);
        let reply = Reply::of(request).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        assert!(reply.body.contains("name begins with"), "{}", reply.body);
    }
    world.get(&tenant.key, "/v1/tenant").await.expect(200);
}
