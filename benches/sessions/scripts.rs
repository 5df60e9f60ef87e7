//! The service's statements, as scripts for pgbench.

use throughline::domain::conversation::message::NewMessage;
use throughline::store::conversation::messages::{APPEND, LIST_NEWEST};
use throughline::store::conversation::tips::TIP_BY_ID;
use uuid::Uuid;

use crate::Task;
use crate::pgbench::{Pgbench, with_values};
use crate::seed::{self, SHORT_SESSIONS};
use crate::service::{TEXT, turn};

/// The transaction of a task.
pub fn script(pgbench: &Pgbench, task: Task) -> String {
    let tenant = format!("'{}'::uuid", pgbench.tenant);
    let uuid = |id: Uuid| format!("'{id}'::uuid");
    let tip = |session: String| {
        let nil = uuid(Uuid::nil());
        let values = [&tenant, &session, &nil, "null::uuid", "now()"];
        with_values(TIP_BY_ID, &values)
    };
    match task {
        Task::Tip { depth } => tip(uuid(seed::first_link(depth).as_uuid())),
        Task::History { limit } => {
            let session = uuid(seed::long_session().as_uuid());
            let last = i64::MAX.to_string();
            let values = [tenant.as_str(), &session, "0", &last, &limit.to_string()];
            pgbench.transaction(&with_values(LIST_NEWEST, &values))
        }
        Task::Append => {
            let session = seed::session_sql(":number");
            let statements = format!("{}{}", tip(session.clone()), append(pgbench, &session));
            let choose = format!("\\set number random(1, {SHORT_SESSIONS})\n");
            choose + &pgbench.transaction(&statements)
        }
    }
}

fn append(pgbench: &Pgbench, session: &str) -> String {
    let messages = turn();
    let tokens: Vec<i32> = messages.iter().map(NewMessage::tokens).collect();
    let content = format!(r#"'{{"\"{TEXT}\"","\"{TEXT}\""}}'"#);
    let values = [
        &format!("'{}'::uuid", pgbench.tenant),
        session,
        "2::bigint",
        &format!("{}::bigint", tokens.iter().sum::<i32>()),
        "true",
        "null",
        "now()",
        "'{user,assistant}'",
        "'{normal,normal}'",
        &content,
        "'{null,null}'",
        "'{null,null}'",
        &format!("'{{{},{}}}'", tokens[0], tokens[1]),
        "'{true,false}'",
        "null::uuid",
        "null::text",
        "'{null,null}'",
    ];
    with_values(APPEND, &values)
}
