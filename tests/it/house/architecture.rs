//! The shape of the code: imports go one way, and SQL, Redis and tenants' transactions stay in their
//! rooms. Read as text, so a slip costs a line here and not a review.

use std::path::Path;

use crate::support::servers::cluster::project;

/// A room and the rooms it may import from. `ground` is everyone's.
const ALLOWED: [(&str, &[&str]); 26] = [
    ("domain", &["ground"]),
    (
        "main",
        &[
            "dev", "server", "http", "store", "tenants", "audit", "secrets", "ground",
        ],
    ),
    (
        "dev",
        &[
            "server", "app", "auth", "tenants", "store", "domain", "ground",
        ],
    ),
    (
        "server",
        &["http", "jobs", "secrets", "app", "notifications", "ground"],
    ),
    (
        "http",
        &[
            "agent_runtime",
            "completions",
            "deliveries",
            "idempotency",
            "inbound",
            "people",
            "sessions",
            "tenants",
            "turns",
            "app",
            "limits",
            "notifications",
            "streams",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "jobs",
        &[
            "idempotency",
            "inbound",
            "people",
            "sessions",
            "tenants",
            "turns",
            "app",
            "notifications",
            "streams",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "turns",
        &[
            "idempotency",
            "people",
            "sessions",
            "app",
            "notifications",
            "agent_runtime",
            "streams",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "inbound",
        &[
            "idempotency",
            "people",
            "sessions",
            "turns",
            "app",
            "agent_runtime",
            "streams",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "deliveries",
        &[
            "app",
            "limits",
            "notifications",
            "streams",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "completions",
        &["app", "limits", "agent_runtime", "domain", "ground"],
    ),
    (
        "tenants",
        &[
            "audit",
            "idempotency",
            "sessions",
            "app",
            "agent_runtime",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    ("audit", &["app", "auth", "store", "domain", "ground"]),
    (
        "people",
        &[
            "app", "audit", "sessions", "auth", "store", "domain", "ground",
        ],
    ),
    ("sessions", &["app", "audit", "store", "domain", "ground"]),
    ("idempotency", &["app", "store", "ground"]),
    (
        "secrets",
        &[
            "audit",
            "app",
            "agent_runtime",
            "auth",
            "store",
            "domain",
            "ground",
        ],
    ),
    (
        "app",
        &[
            "limits",
            "notifications",
            "agent_runtime",
            "streams",
            "usage",
            "auth",
            "store",
            "redis",
            "upstream",
            "ground",
        ],
    ),
    (
        "streams",
        &["notifications", "auth", "store", "domain", "ground"],
    ),
    (
        "agent_runtime",
        &["auth", "store", "upstream", "domain", "ground"],
    ),
    ("notifications", &["redis", "ground"]),
    ("limits", &["redis", "ground"]),
    ("usage", &["auth", "store", "domain", "ground"]),
    ("auth", &["limits", "store", "upstream", "domain", "ground"]),
    ("store", &["domain", "ground"]),
    ("redis", &["ground"]),
    ("upstream", &["domain", "ground"]),
];
const GROUND: [&str; 15] = [
    "cache",
    "clock",
    "config",
    "crypto",
    "descriptors",
    "error",
    "fair_queue",
    "child_guard",
    "ids",
    "notification",
    "recent",
    "retry",
    "shutdown",
    "telemetry",
    "wire_text",
];

/// A word and the only files (by beginning of path) that may contain it.
const KEPT_IN: [(&str, &[&str]); 11] = [
    // Only a commit notifies, of what its transaction collected.
    (".publish(", &["notifications.rs", "app.rs", "redis/"]),
    ("sqlx::", &["store/", "dev/servers.rs", "ids.rs"]),
    ("deadpool_redis", &["redis/", "dev/servers.rs"]),
    ("begin_tenant(", &["store/", "auth/"]),
    (
        "operator_enter(",
        &[
            "store/",
            "tenants/mod.rs",
            "audit/verify.rs",
            "secrets/",
            "dev/",
        ],
    ),
    // Opens any tenant, without a credential.
    (
        "ServiceCaller::for_tenant",
        &[
            "agent_runtime.rs",
            "dev/mod.rs",
            "streams/",
            "tenants/mod.rs",
            "turns/",
            "usage.rs",
        ],
    ),
    ("actix_web", &["http/", "server.rs"]),
    ("std::process::Command", &["child_guard.rs", "dev/"]),
    ("aws_lc_rs", &["crypto.rs"]),
    ("reqwest", &["upstream/"]),
    ("jsonwebtoken", &["auth/", "domain/tenant/issuer.rs"]),
];

/// Statements without a tenant: on global tables, on Postgres' own catalog, on definer functions.
const TENANTLESS: [&str; 14] = [
    "from tenants",
    "update tenants",
    "into tenants",
    "from jobs",
    "from due_replies",
    "from due_turns",
    "from secret_keys_in_use",
    "from nodes",
    "into nodes",
    "delete from nodes",
    "pg_roles",
    "pg_database",
    "_sqlx_migrations",
    "current_user",
];

/// Every Rust file below `root`, by its path from there.
fn files_below(root: &Path) -> Vec<(String, String)> {
    fn walk(root: &Path, dir: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(root, &path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).unwrap().display().to_string();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    walk(root, root, &mut found);
    found
}

fn sources() -> Vec<(String, String)> {
    let mut found = files_below(&project().join("src"));
    found.retain(|(name, _)| !name.ends_with("_tests.rs"));
    assert!(found.len() > 20);
    found
}

fn room_of(file: &str) -> &str {
    file.split('/').next().unwrap().trim_end_matches(".rs")
}

/// The code without its unit tests.
fn product(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap()
}

#[test]
fn imports_go_one_way() {
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file);
        if room == "lib" {
            continue;
        }
        let allowed = match ALLOWED.iter().find(|(name, _)| *name == room) {
            Some((_, allowed)) => *allowed,
            None if GROUND.contains(&room) => &["ground"],
            None => panic!("the room {room} is not in the table"),
        };
        let text = product(&text).replace("throughline::", "crate::");
        for part in text.split("crate::").skip(1) {
            let names = match part.strip_prefix('{') {
                Some(group) => group.split('}').next().unwrap().split(',').collect(),
                None => vec![part],
            };
            for name in names {
                let word = |c: char| !(c.is_alphanumeric() || c == '_');
                let target = name.trim().split(word).next().unwrap();
                let fine = target == room
                    || allowed.contains(&target)
                    || allowed.contains(&"ground") && GROUND.contains(&target);
                if !fine && !target.is_empty() {
                    wrong.push(format!("{file} imports {target}"));
                }
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn each_concern_stays_in_its_room() {
    let mut wrong = Vec::new();
    for (file, text) in sources() {
        for (word, homes) in KEPT_IN {
            let home = homes.iter().any(|home| file.starts_with(home));
            if !home && product(&text).contains(word) && file != "main.rs" {
                wrong.push(format!("{file} has {word}"));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_statement_on_tenant_rows_names_its_tenant() {
    let verbs = [
        "select ",
        "insert into ",
        "update ",
        "delete from ",
        "with ",
    ];
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (file, text) in sources() {
        for literal in product(&text).split('"').skip(1).step_by(2) {
            let sql = literal.trim_start();
            if !file.starts_with("store/") || !verbs.iter().any(|verb| sql.starts_with(verb)) {
                continue;
            }
            seen += 1;
            let tenantless = TENANTLESS.iter().any(|known| sql.contains(known));
            // A question about no table, or the beginning of a text that goes on elsewhere.
            let probe = sql.ends_with('(') || !sql.contains(" from ") && sql.starts_with("select ");
            if !(sql.contains("tenant_id") || tenantless || probe) {
                wrong.push(format!("{file}: {sql}"));
            }
            if sql.contains("limit $") && !sql.contains("order by") {
                wrong.push(format!("{file}: a limit without an order: {sql}"));
            }
        }
    }
    assert!(seen > 15, "saw only {seen} statements");
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_module_says_what_it_is_for_and_stays_readable() {
    for (file, text) in sources() {
        assert!(
            text.starts_with("//! "),
            "{file} does not say what it is for"
        );
        let lines = text.lines().count();
        assert!(lines <= 500, "{file} has {lines} lines: is it one idea?");
    }
}

/// The tests' own files, by name and text.
fn test_sources() -> Vec<(String, String)> {
    let files = files_below(&project().join("tests/it"));
    assert!(files.len() > 100);
    files
}

/// What two tests need has its place in `support`: a test file can be read, moved and deleted alone.
#[test]
fn no_test_file_imports_from_another() {
    let mut wrong = Vec::new();
    for (file, text) in test_sources() {
        let shelf = file.split('/').next().unwrap();
        if shelf == "house" {
            continue;
        }
        for (line, _) in text.match_indices("crate::") {
            let target = &text[line + "crate::".len()..];
            if !target.starts_with("support::") {
                let target = target.lines().next().unwrap();
                wrong.push(format!("{file} imports {target}"));
            }
        }
        // The parts of one oracle belong together.
        if shelf != "chaos" && text.contains("super::") {
            wrong.push(format!("{file} imports from its neighbours"));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// A test awaits a condition or moves the clock. `support` has the waits; chaos is about real time.
#[test]
fn no_test_sleeps() {
    let mut wrong = Vec::new();
    for (file, text) in test_sources() {
        let waits = ["support/", "chaos/", "house/"];
        if text.contains("sleep(") && !waits.iter().any(|shelf| file.starts_with(shelf)) {
            wrong.push(file);
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_test_file_says_what_it_shows_and_stays_readable() {
    let mut shelves = std::collections::BTreeMap::new();
    for (file, text) in test_sources() {
        assert!(
            text.starts_with("//! "),
            "{file} does not say what it shows"
        );
        let lines = text.lines().count();
        assert!(lines <= 500, "{file} has {lines} lines: is it one idea?");
        let shelf = file.rsplit_once('/').map(|(shelf, _)| shelf.to_owned());
        *shelves.entry(shelf).or_insert(0) += 1;
    }
    for (shelf, files) in shelves {
        assert!(files <= 16, "{shelf:?} has {files} files");
    }
}
