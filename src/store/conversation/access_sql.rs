//! The rights of a caller in a conversation, as SQL: each condition has its only text here, and every statement that
//! reads rights uses it. `c` is always the conversation, `$1` the tenant.

/// `hidden_from`: another conversation of the caller's namespace has the client id of `c`, so that id does not name
/// `c` for the caller. `granted_to`: the user has a grant in `c` that is valid at the time `now`. The third form
/// selects both. Arguments are parameters or columns.
macro_rules! access_columns {
    (hidden_from: $namespace:literal) => {
        concat!(
            "exists (select 1
                       from conversations own
                      where own.tenant_id = $1
                        and own.namespace = ",
            $namespace,
            "
                        and own.client_id = c.client_id
                        and c.namespace <> ",
            $namespace,
            ")"
        )
    };
    (granted_to: $user:literal, now: $now:literal) => {
        concat!(
            "exists (select 1
                       from conversation_grants g
                      where g.tenant_id = $1
                        and g.conversation_id = c.id
                        and g.user_id = ",
            $user,
            "
                        and g.revoked_at is null
                        and g.expires_at > ",
            $now,
            ")"
        )
    };
    (namespace: $namespace:literal, user: $user:literal, now: $now:literal) => {
        concat!(
            access_columns!(hidden_from: $namespace),
            " as hidden, ",
            access_columns!(granted_to: $user, now: $now),
            " as granted"
        )
    };
}
pub(in crate::store) use access_columns;
