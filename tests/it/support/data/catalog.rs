//! What must be true of the schema, read from Postgres' own catalog. Each rule answers the things that
//! break it, so a test can show that it notices.

use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, PgConnection};

/// Tables without a tenant's rows. Adding one here is a decision, not a formality.
const GLOBAL_TABLES: [&str; 5] = [
    "_sqlx_migrations",
    "jobs",
    "nodes",
    "tenant_erasure_order",
    "tenants",
];
/// Functions that look before a tenant is known. Each is an opening in the wall.
const DEFINER_FUNCTIONS: [&str; 7] = [
    "due_replies",
    "due_turns",
    "erase_lost_answers",
    "erase_tenant",
    "find_api_key",
    "find_issuers",
    "secret_keys_in_use",
];
/// The policy's text as Postgres prints it; written in one migration.
const POLICY: &str = "(tenant_id = ( SELECT (NULLIF(current_setting('app.tenant_id'::text, true), ''::text))::uuid AS \"nullif\"))";

/// Each rule: what it holds, and a query for what breaks it ($1 is the list of global tables).
const RULES: [(&str, &str); 17] = [
    (
        "row-level security is enabled and forced",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'f', 'm')
            and c.relname <> all ($1)
            and not (c.relrowsecurity and c.relforcerowsecurity)",
    ),
    (
        "exactly one policy lets the service in",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and c.relname <> all ($1)
            and (select count(*) from pg_policies p
                  where p.schemaname = 'public' and p.tablename = c.relname
                    and p.policyname = 'tenant_isolation' and p.permissive = 'PERMISSIVE'
                    and p.roles = array['throughline_service']::name[] and p.cmd = 'ALL') <> 1",
    ),
    (
        "no other policy, but the definer's read and erasure",
        "select p.tablename || ': ' || p.policyname from pg_policies p
          where p.schemaname = 'public' and p.policyname <> 'tenant_isolation'
            and not ((p.policyname, p.cmd) in (('definer_read', 'SELECT'), ('definer_erase', 'DELETE'))
                     and p.roles = array['throughline_definer']::name[] and p.qual = 'true')
            and $1::text[] is not null",
    ),
    (
        "tenant_id is a uuid and not null",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and c.relname <> all ($1)
            and not exists (select 1 from pg_attribute a
                             where a.attrelid = c.oid and a.attname = 'tenant_id'
                               and a.atttypid = 'uuid'::regtype and a.attnotnull)",
    ),
    (
        "there is a primary key",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and $1::text[] is not null
            and not exists (select 1 from pg_index i where i.indrelid = c.oid and i.indisprimary)",
    ),
    (
        "every index, key and unique constraint begins with tenant_id, and is valid",
        "select i.indexrelid::regclass::text from pg_index i join pg_class c on c.oid = i.indrelid
          where c.relnamespace = 'public'::regnamespace
            and (not i.indisvalid
                 or c.relname <> all ($1)
                    and not exists (select 1 from pg_attribute a
                                     where a.attrelid = c.oid and a.attnum = i.indkey[0]
                                       and a.attname = 'tenant_id'))",
    ),
    (
        "every foreign key carries tenant_id on both sides",
        "select k.conname::text from pg_constraint k join pg_class c on c.oid = k.conrelid
          where c.relnamespace = 'public'::regnamespace and k.contype = 'f'
            and c.relname <> all ($1)
            and not exists (
              select 1
                from unnest(k.conkey, k.confkey) as pair (here, there)
                join pg_attribute h on h.attrelid = k.conrelid and h.attnum = pair.here
                join pg_attribute t on t.attrelid = k.confrelid and t.attnum = pair.there
               where h.attname = 'tenant_id'
                 and (t.attname = 'tenant_id'
                      or k.confrelid = 'tenants'::regclass and t.attname = 'id'))",
    ),
    (
        "constraints are named for what they hold",
        "select k.conname::text from pg_constraint k join pg_class c on c.oid = k.conrelid
          where c.relnamespace = 'public'::regnamespace and k.contype in ('c', 'f')
            and c.relname <> '_sqlx_migrations'
            and k.conname ~ '_check[0-9]*$' and $1::text[] is not null",
    ),
    (
        "the service may not truncate, reference or trigger, and the public may nothing",
        "select g.table_name || ': ' || g.grantee || ' ' || g.privilege_type
           from information_schema.table_privileges g
          where g.table_schema = 'public' and $1::text[] is not null
            and (g.grantee = 'PUBLIC'
                 or g.grantee = 'throughline_service'
                    and g.privilege_type in ('TRUNCATE', 'REFERENCES', 'TRIGGER')
                 or g.grantee = 'throughline_definer' and g.privilege_type not in ('SELECT', 'DELETE')
                 or g.grantee = 'throughline')",
    ),
    (
        "the service can only add to the audit and read it",
        "select p from unnest(array['UPDATE', 'DELETE', 'TRUNCATE']) p
          where $1::text[] is not null
            and (has_table_privilege('throughline_service', 'audit', p)
                 or p = 'UPDATE' and has_any_column_privilege('throughline_service', 'audit', p))",
    ),
    (
        "views run as their caller",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind = 'v'
            and $1::text[] is not null
            and not coalesce(c.reloptions @> array['security_invoker=true'], false)",
    ),
    (
        "no function is open to the public",
        "select p.oid::regprocedure::text from pg_proc p
          where p.pronamespace = 'public'::regnamespace and $1::text[] is not null
            and has_function_privilege('public', p.oid, 'execute')",
    ),
    (
        "every function has a fixed search path, and a definer function the definer as owner",
        "select p.oid::regprocedure::text from pg_proc p
          where p.pronamespace = 'public'::regnamespace and $1::text[] is not null
            and (not coalesce(array_to_string(p.proconfig, ',') ~ 'search_path=pg_catalog', false)
                 or p.prosecdef and p.proowner <> 'throughline_definer'::regrole)",
    ),
    (
        "a tenant's rows go with it: of listed tables, or by a cascade from one",
        "select c.relname::text from pg_class c
          where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and c.relname <> all ($1)
            and c.relname not in (select table_name from tenant_erasure_order)
            and not exists (select 1
                              from pg_constraint k
                              join pg_class parent on parent.oid = k.confrelid
                              join tenant_erasure_order o on o.table_name = parent.relname
                             where k.conrelid = c.oid and k.contype = 'f' and k.confdeltype = 'c')",
    ),
    (
        "what is listed for that is a tenant's table, and may be erased",
        "select o.table_name from tenant_erasure_order o
          where o.table_name = any ($1)
             or not exists (select 1 from pg_policies p
                             where p.schemaname = 'public' and p.tablename = o.table_name
                               and p.policyname = 'definer_erase')",
    ),
    (
        "what refers to other rows is erased before them",
        "select k.conname::text
           from pg_constraint k
           join pg_class child on child.oid = k.conrelid
           join pg_class parent on parent.oid = k.confrelid
           join tenant_erasure_order c on c.table_name = child.relname
           join tenant_erasure_order p on p.table_name = parent.relname
          where k.contype = 'f' and c.position > p.position and k.confdeltype in ('a', 'r')
            and $1::text[] is not null",
    ),
    (
        "no role of ours is superuser, bypasses row-level security, or logs in without need",
        "select r.rolname::text from pg_roles r
          where $1::text[] is not null
            and r.rolname in ('throughline', 'throughline_service', 'throughline_definer', 'throughline_owner')
            and (r.rolsuper or r.rolbypassrls
                 or r.rolname in ('throughline_service', 'throughline_definer') and r.rolcanlogin)",
    ),
];

/// Everything that breaks a rule, as "rule: thing".
pub async fn violations(connection: &mut PgConnection) -> Vec<String> {
    let mut found = Vec::new();
    for (rule, query) in RULES {
        let things: Vec<String> = sqlx::query_scalar(query)
            .bind(GLOBAL_TABLES.as_slice())
            .fetch_all(&mut *connection)
            .await
            .unwrap();
        found.extend(things.into_iter().map(|thing| format!("{rule}: {thing}")));
    }
    let policies: Vec<(String, Option<String>, Option<String>)> = sqlx::query_as(
        "select tablename::text, qual, with_check from pg_policies
          where schemaname = 'public' and policyname = 'tenant_isolation'",
    )
    .fetch_all(&mut *connection)
    .await
    .unwrap();
    for (table, using, check) in policies {
        if using.as_deref() != Some(POLICY) || check.as_deref() != Some(POLICY) {
            found.push(format!(
                "the policy has the one text: {table}: {using:?} {check:?}"
            ));
        }
    }
    let definers: Vec<String> = sqlx::query_scalar(
        "select proname::text from pg_proc
          where pronamespace = 'public'::regnamespace and prosecdef order by proname",
    )
    .fetch_all(&mut *connection)
    .await
    .unwrap();
    if definers != DEFINER_FUNCTIONS {
        found.push(format!(
            "the definer functions are the listed ones: {definers:?}"
        ));
    }
    found
}

pub async fn tenant_tables(connection: &mut PgConnection) -> Vec<String> {
    sqlx::query_scalar(
        "select relname::text from pg_class
          where relnamespace = 'public'::regnamespace and relkind in ('r', 'p') and relname <> all ($1)
          order by relname",
    )
    .bind(GLOBAL_TABLES.as_slice())
    .fetch_all(connection)
    .await
    .unwrap()
}

/// Leaves the statements' own predicates as the only thing between tenants.
pub async fn disable_row_level_security(superuser: &mut PgConnection) {
    for table in tenant_tables(superuser).await {
        let sql =
            format!("alter table {table} disable row level security, no force row level security");
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut *superuser)
            .await
            .unwrap();
    }
}

/// Tables whose rows belong to a tenant's credentials and books, and not to its people.
const NOT_COPIED: [&str; 6] = [
    "api_keys",
    "agents",
    "audit",
    "audit_heads",
    "idempotency",
    "usage_hourly",
];

/// Tables with the rows of people and their conversations.
pub async fn people_tables(superuser: &mut PgConnection) -> Vec<String> {
    let mut tables = tenant_tables(superuser).await;
    tables.retain(|table| !NOT_COPIED.contains(&table.as_str()));
    tables
}

/// Every row of one tenant's people, once more in another: equal ids, names and keys.
pub async fn copy_rows(superuser: &mut PgConnection, from: Uuid, to: Uuid) {
    mirror_rows(superuser, from, to, "").await;
}

/// The same instead of the rows that are there. Nobody sees them before `changes` were made to them.
pub async fn mirror_rows(superuser: &mut PgConnection, from: Uuid, to: Uuid, changes: &str) {
    // As a replica would: rows that name each other may come in any order.
    let mut sql = "begin; set local session_replication_role = replica;".to_owned();
    for table in people_tables(superuser).await {
        let columns: String = sqlx::query_scalar(
            "select string_agg(quote_ident(attname), ', ' order by attnum)
               from pg_attribute
              where attrelid = $1::regclass
                and attnum > 0
                and not attisdropped
                and attgenerated = ''
                and attname <> 'tenant_id'",
        )
        .bind(&table)
        .fetch_one(&mut *superuser)
        .await
        .unwrap();
        sql += &format!(
            "delete from {table} where tenant_id = '{to}';
             insert into {table} (tenant_id, {columns})
             select '{to}', {columns} from {table} where tenant_id = '{from}';"
        );
    }
    sql += &format!("{changes}; commit");
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(superuser)
        .await
        .unwrap();
}

/// Every row of a tenant's people, as text.
pub async fn dump_people(superuser: &mut PgConnection, tenant: Uuid) -> String {
    let mut all = String::new();
    for table in people_tables(superuser).await {
        let sql = format!(
            "select coalesce(json_agg(t order by t::text), '[]')::text from {table} t where tenant_id = $1"
        );
        let rows: String = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(tenant)
            .fetch_one(&mut *superuser)
            .await
            .unwrap();
        all += &format!("{table}: {rows}\n");
    }
    all
}
