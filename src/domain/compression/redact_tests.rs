//! Each kind of secret, ordinary text, and any text.

use std::time::Instant;

use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;
use crate::domain::tenant::api_key::key_text;
use crate::ids::{ApiKeyId, TenantId};

fn check(text: &str, expected: &str) {
    assert_eq!(redact(text), expected, "of {text}");
}

#[test]
fn keys_are_known_by_their_prefix() {
    for key in [
        "sk-abcdefghijklmnopqrstuvwxyz123456",
        "sk-proj-Ab1_cd2-Ef3gh4Ij5kL6mN7oP8",
        "sk-ant-api03-R2D2abcdefghijklmn-xyz_0",
        "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "github_pat_11ABCDEFG0abcdefghij_klmnop",
        "glpat-x1y2z3a4b5c6d7e8f9g0",
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-1234567890123-AbCdEf",
        "xapp-1-A0123456789-abc",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
        "hf_abcdefghijklmnopqrstuv1234",
        "npm_abcdefghijklmnopqrstuvwxyz0123456789",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    ] {
        check(key, REDACTED);
        check(&format!("use {key}."), "use [redacted].");
        check(&format!("键是{key}。"), "键是[redacted]。");
        check(
            &format!("({key}, \"{key}\")"),
            "([redacted], \"[redacted]\")",
        );
        check(
            &format!("export KEY={key}\nnext"),
            "export KEY=[redacted]\nnext",
        );
    }
}

#[test]
fn the_keys_of_this_service_are_secrets() {
    for secret in [[0; 24], [7; 24], [255; 24]] {
        let key = key_text(TenantId::generate(), ApiKeyId::generate(), secret);
        let text = format!("my key is {} ok", key.expose_secret());
        check(&text, "my key is [redacted] ok");
    }
}

#[test]
fn bearers_urls_and_bots_lose_their_secret() {
    for (text, expected) in [
        (
            "Authorization: Bearer abc123def456",
            "Authorization: Bearer [redacted]",
        ),
        ("bearer  a.b-c~d+e/f1==", "bearer  [redacted]"),
        (
            "authorization: Basic dXNlcjpwYXNzd29yZDE=",
            "authorization: Basic [redacted]",
        ),
        (
            r#"{"Authorization": "Basic dXNlcjpwYXNzd29yZDE="}"#,
            r#"{"Authorization": "Basic [redacted]"}"#,
        ),
        (
            "postgres://app:s3cret@db:5432/x",
            "postgres://app:[redacted]@db:5432/x",
        ),
        ("redis://:p@ss@host", "redis://:[redacted]@host"),
        ("https://host/a:b@c", "https://host/a:b@c"),
        ("ssh://git@github.com/x", "ssh://git@github.com/x"),
        (
            "bot 123456789:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw",
            "bot 123456789:[redacted]",
        ),
    ] {
        check(text, expected);
    }
}

#[test]
fn private_keys_are_secrets_up_to_their_end() {
    let key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow==\nabc\n-----END RSA PRIVATE KEY-----";
    check(&format!("a\n{key}\nb {key}"), "a\n[redacted]\nb [redacted]");
    check(
        "x -----BEGIN PRIVATE KEY-----\\nMIIE\\n-----END PRIVATE KEY-----\\n y",
        "x [redacted]\\n y",
    );
    check(
        "-----BEGIN PRIVATE KEY-----\nMIIEow==\n(cut)",
        "[redacted](cut)",
    );
    let public = "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----";
    check(public, public);
}

#[test]
fn values_of_secret_names_are_secrets() {
    for (text, expected) in [
        ("password=hunter2", "password=[redacted]"),
        ("DB_PASSWORD = hunter2", "DB_PASSWORD = [redacted]"),
        ("password=abc&user=ann", "password=[redacted]&user=ann"),
        ("?token=abcdef&x=1", "?token=[redacted]&x=1"),
        ("api_key=k", "api_key=[redacted]"),
        ("X-API-Key: abcdef", "X-API-Key: [redacted]"),
        (
            "The API key: abc123, thanks",
            "The API key: [redacted], thanks",
        ),
        (
            "My password: hunter2 (old)",
            "My password: [redacted] (old)",
        ),
        ("Password: correcthorse", "Password: [redacted]"),
        ("**Password:** correcthorse", "**Password:** [redacted]"),
        ("password：пароль123", "password：[redacted]"),
        (
            r#"{"password": "a b\"c", "x": 1}"#,
            r#"{"password": "[redacted]", "x": 1}"#,
        ),
        (
            r#"{\"client_secret\":\"abc\",\"x\":1}"#,
            r#"{\"client_secret\":\"[redacted]\",\"x\":1}"#,
        ),
        (r#"{"token": "abc123def"}"#, r#"{"token": "[redacted]"}"#),
        ("'secret' => 'abcdef'", "'secret' => '[redacted]'"),
        (
            "login --password hunter2 --user ann",
            "login --password [redacted] --user ann",
        ),
        (
            "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG",
            "AWS_SECRET_ACCESS_KEY=[redacted]",
        ),
        (
            "THROUGHLINE_SECRET_KEY=abc",
            "THROUGHLINE_SECRET_KEY=[redacted]",
        ),
    ] {
        check(text, expected);
    }
}

#[test]
fn ordinary_text_stays() {
    for text in [
        "",
        "The bearer of this letter has good news; bearer authentication is used.",
        "Which password: the old one or the new one?",
        "I forgot my password, and the token is expired.",
        "password: see the note below",
        "Unexpected token: else was expected",
        "let token = lexer.next();",
        "let token = next_token(input);",
        "assert password == other",
        "max_tokens=4096, tokens: 17, token_count: 1200",
        "\"password\": null, \"token\": \"the\"",
        "password=[redacted] password=*** password=${DB_PASSWORD} token=<your token>",
        "commit 2afc335b1d0e4c6f8a9b7c5d3e1f0a2b4c6d8e0f",
        "ses_0193a1b2c3d4e5f60718293a4b5c6d7e and 550e8400-e29b-41d4-a716-446655440000",
        "https://example.com:8080/a@b?x=1",
        "the sk-learn-like interface of version-2 task-force-one",
        "AKIA is a prefix, and eyJ too. AKIAshort",
        "12:30:45 at 10.0.0.1:8080",
        "密码在文件里，请不要改。 كلمة المرور في الملف",
        "std::token::Secret::new, Monkey: banana",
        "-----BEGIN CERTIFICATE-----",
        "PWD=/home/ann",
    ] {
        check(text, text);
    }
}

#[test]
fn nul_is_replaced() {
    assert_eq!(clean("a\0b password=\0x"), "a\u{FFFD}b password=[redacted]");
    assert!(matches!(clean("plain"), Cow::Borrowed("plain")));
}

#[test]
fn odd_texts_take_linear_time() {
    for part in [
        "sk-",
        "eyJ",
        "eyJ-",
        "a=",
        "token:",
        "password: ",
        "password=/",
        "password=\"",
        "password='",
        "://",
        "://a:b",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN ",
        "bearer ",
        "123456789:AA",
        "\\",
        "\\\"",
        "--token ",
        "AKIA",
        "authorization:",
        " ",
        "=",
        "::",
        "密",
    ] {
        let text = part.repeat(1_000_000 / part.len());
        let began = Instant::now();
        redact(&text);
        assert!(
            began.elapsed().as_secs() < 5,
            "{part}: {:?}",
            began.elapsed()
        );
    }
}

fn prose() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        "[a-z]{1,12}",
        "[A-Z][a-z]{1,9}[.,;:!?]?",
        "[0-9]{1,12}",
        "[a-f0-9]{32}",
        "[а-яё]{1,10}",
        "[\u{4e00}-\u{4e40}]{1,12}[。，：]?",
        "[\u{627}-\u{64a}]{1,10}",
        "/[a-z]{1,8}/[a-z]{1,8}\\.[a-z]{2}",
        "[a-z]{1,8}@[a-z]{1,8}\\.com",
        Just("\n".to_owned()),
    ];
    prop::collection::vec(word, 0..60).prop_map(|words| words.join(" "))
}

proptest! {
    #[test]
    fn prose_is_not_changed(text in prose()) {
        prop_assert_eq!(redact(&text), text.as_str());
    }

    #[test]
    fn any_text_is_redacted_once(text in ".{0,80}(password|token|Bearer|://|sk-)[ -~]{0,40}") {
        let once = redact(&text).into_owned();
        prop_assert_eq!(redact(&once), once.as_str());
    }

    #[test]
    fn a_key_is_found_in_any_prose(before in prose(), after in prose(), key in "sk-[a-z0-9]{12}[0-9][a-z]{12}") {
        let redacted = redact(&format!("{before} {key} {after}")).into_owned();
        prop_assert_eq!(redacted, format!("{before} {REDACTED} {after}"));
    }
}
