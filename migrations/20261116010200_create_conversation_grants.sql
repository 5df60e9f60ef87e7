-- The right of another user to read and speak in one conversation, for a time. `via` says how it came
-- to be. A revoked one is kept: its owner sees who once could read.
create table conversation_grants (
  tenant_id        uuid        not null,
  conversation_id  uuid        not null,
  user_id          uuid        not null,
  via              text        not null constraint conversation_grants_via_known check (via in ('continuation')),
  created_at       timestamptz not null,
  expires_at       timestamptz not null,
  revoked_at       timestamptz,
  constraint conversation_grants_pkey primary key (tenant_id, conversation_id, user_id),
  constraint conversation_grants_conversation_fkey foreign key (tenant_id, conversation_id)
    references conversations (tenant_id, id) on delete cascade,
  constraint conversation_grants_user_fkey foreign key (tenant_id, user_id)
    references users (tenant_id, id) on delete cascade
);
create index conversation_grants_of_user on conversation_grants (tenant_id, user_id);
select install_tenant_policy('conversation_grants');
grant select, insert, update, delete on conversation_grants to throughline_service;
