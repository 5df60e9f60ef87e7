-- Columns get the names that the API and the code use. Nodes of the version before this one do not know them: stop
-- those nodes before this migration runs. The table turns is rewritten once, under a lock.
--   turns.request_hash   was asked_hash: the hash of the request, by which a retry is recognised
--   turns.session_info   was told: the session as the caller was given it when the turn was accepted
--   turns.reply_via      `waiting` was http: a caller waits for the answer; `returned` was told: the caller has it
--   sessions, slots: last_user_at was last_person_at
set local lock_timeout = '5s';

alter table turns rename column asked_hash to request_hash;
alter table turns rename column told to session_info;

alter table sessions rename column last_person_at to last_user_at;
alter table slots rename column last_person_at to last_user_at;

drop index turns_untold;
alter table turns
  drop constraint turns_reply_via_known,
  alter column reply_via type text
    using (case reply_via when 'http' then 'waiting' when 'told' then 'returned' else reply_via end),
  add constraint turns_reply_via_known check (reply_via in ('waiting', 'returned', 'delivery', 'failed'));
create index turns_waiting_for_caller on turns (tenant_id, ended_at) where reply_via = 'waiting' and ended_at is not null;

create or replace function due_replies(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql volatile security definer
set search_path = pg_catalog, public
as $$
  select t.tenant_id, t.id
    from turns t
   where t.reply_via = 'waiting'
     and t.ended_at is not null
     and coalesce(t.due_at, t.ended_at + interval '5 seconds') <= clock_timestamp()
   order by row_number() over (partition by t.tenant_id order by random()), random()
   limit p_limit
$$;
